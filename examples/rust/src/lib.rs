//! Three functions of sparse_mla.h and what they need of dlpack.h. The names are those of the
//! headers; the header says what each argument must be.

#![allow(clippy::upper_case_acronyms)]

use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;
use std::ptr;

pub const DL_CPU: i32 = 1; // kDLCPU
pub const DL_FLOAT: u8 = 2; // kDLFloat

#[repr(C)]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}

#[repr(C)]
pub struct DLDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[repr(C)]
pub struct DLTensor {
    pub data: *mut c_void,
    pub device: DLDevice,
    pub ndim: i32,
    pub dtype: DLDataType,
    pub shape: *mut i64,
    pub strides: *mut i64, // in elements; null: contiguous
    pub byte_offset: u64,
}

/// `smla_error`
#[repr(C)]
pub struct Error {
    pub status: c_int,
    pub text: [c_char; 508],
}

impl Default for Error {
    fn default() -> Self {
        Error { status: 0, text: [0; 508] }
    }
}

/// `smla_merge_attn_states_args`
#[repr(C)]
pub struct MergeAttnStatesArgs {
    pub struct_size: usize,
    pub out_a: *const DLTensor,
    pub lse_a: *const DLTensor,
    pub out_b: *const DLTensor,
    pub lse_b: *const DLTensor,
    pub out: *const DLTensor,
    pub lse: *const DLTensor,
    pub stream: *mut c_void,
    pub attn_sink: *const DLTensor,
}

impl Default for MergeAttnStatesArgs {
    fn default() -> Self {
        MergeAttnStatesArgs {
            struct_size: size_of::<Self>(),
            out_a: ptr::null(),
            lse_a: ptr::null(),
            out_b: ptr::null(),
            lse_b: ptr::null(),
            out: ptr::null(),
            lse: ptr::null(),
            stream: ptr::null_mut(),
            attn_sink: ptr::null(),
        }
    }
}

extern "C" {
    pub fn smla_version() -> c_int;
    pub fn smla_status_name(status: c_int) -> *const c_char;
    pub fn smla_merge_attn_states(args: *const MergeAttnStatesArgs, error: *mut Error) -> c_int;
}
