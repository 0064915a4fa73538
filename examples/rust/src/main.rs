//! Merges two partial attention results, and reads the text of an error.

use sparse_mla_sys::*;
use std::ffi::{c_void, CStr};
use std::ptr;

/// A contiguous fp32 array in CPU memory. `data` and `shape` must outlive it.
fn describe(data: &mut [f32], shape: &mut [i64]) -> DLTensor {
    assert_eq!(shape.iter().product::<i64>(), data.len() as i64);
    DLTensor {
        data: data.as_mut_ptr() as *mut c_void,
        device: DLDevice { device_type: DL_CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: DLDataType { code: DL_FLOAT, bits: 32, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

fn merge(args: &MergeAttnStatesArgs) -> Result<(), String> {
    let mut error = Error::default();
    match unsafe { smla_merge_attn_states(args, &mut error) } {
        0 => Ok(()),
        status => {
            let name = unsafe { CStr::from_ptr(smla_status_name(status)) };
            let text = unsafe { CStr::from_ptr(error.text.as_ptr()) };
            Err(format!("{}: {}", name.to_string_lossy(), text.to_string_lossy()))
        }
    }
}

fn main() {
    println!("libsparse_mla {}", unsafe { smla_version() });
    let (mut a, mut b, mut out) = ([1.0; 8], [3.0; 8], [0.0; 8]); // 2 tokens, 1 head, 4 values
    let (mut lse_a, mut lse_b, mut lse) = ([0.0; 2], [0.0, 3.0_f32.ln()], [0.0; 2]);
    let (mut rows, mut sums) = ([2, 1, 4], [2, 1]);
    let tensors = [
        describe(&mut a, &mut rows),
        describe(&mut lse_a, &mut sums),
        describe(&mut b, &mut rows),
        describe(&mut lse_b, &mut sums),
        describe(&mut out, &mut rows),
        describe(&mut lse, &mut sums),
    ];
    let mut args = MergeAttnStatesArgs::default();
    [args.out_a, args.lse_a, args.out_b, args.lse_b, args.out, args.lse] =
        tensors.each_ref().map(|tensor| tensor as *const DLTensor);
    merge(&args).expect("the arguments are right");
    println!("out {out:?}, lse {lse:?}");
    // Both parts of token 0 weigh alike; in token 1, b has three times the weight of a.
    let want = [2.0, 2.0, 2.0, 2.0, 2.5, 2.5, 2.5, 2.5];
    assert!(out.iter().zip(want).all(|(x, y): (&f32, f32)| (x - y).abs() < 1e-5));

    args.lse_b = ptr::null();
    let refusal = merge(&args).expect_err("an array is missing");
    println!("{refusal}");
    assert!(refusal.contains("`lse_b`"));
}
