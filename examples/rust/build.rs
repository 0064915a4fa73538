//! Asks `sparse-mla-config`, a command of the installed Python package, where the library is.
//! The environment variable SPARSE_MLA_CONFIG may name another program.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=SPARSE_MLA_CONFIG");
    let program = env::var("SPARSE_MLA_CONFIG").unwrap_or("sparse-mla-config".into());
    let output = Command::new(&program)
        .arg("--libdir")
        .output()
        .unwrap_or_else(|error| panic!("cannot run {program}: {error}; pip install sparse_mla"));
    assert!(output.status.success(), "{program} --libdir failed");
    let folder = String::from_utf8(output.stdout).expect("a path in UTF-8");
    let folder = folder.trim();
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib=sparse_mla");
    // The loader does not look into a Python environment by itself. Only programs of this package
    // get this run-time path; a package that depends on it prints the same line in its build.rs.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    println!("cargo:libdir={folder}"); // DEP_SPARSE_MLA_LIBDIR of such a package
}
