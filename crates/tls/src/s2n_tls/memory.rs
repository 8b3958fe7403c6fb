//! Memory of the library: from `malloc`. By default it locks every allocation, which the usual limit of
//! locked memory allows for two connections only; it overwrites memory before it is freed in any case.

use std::ffi::{c_int, c_void};

use s2n_tls_sys as s2n;

use super::{LibraryError, check};

/// Sets the functions by which the library allocates.
pub(super) fn set_callbacks() -> Result<(), LibraryError> {
    // SAFETY: called once, before the library is initialized; the functions keep their contracts.
    check(unsafe { s2n::s2n_mem_set_callbacks(Some(init), Some(init), Some(allocate), Some(free)) })
}

/// # Safety
///
/// None is needed.
unsafe extern "C" fn init() -> c_int {
    0
}

/// # Safety
///
/// `memory` and `allocated` may be written.
unsafe extern "C" fn allocate(
    memory: *mut *mut c_void,
    requested: u32,
    allocated: *mut u32,
) -> c_int {
    // SAFETY: allocates any number of bytes; null is handled.
    let new = unsafe { libc::malloc(requested as usize) };
    if new.is_null() {
        return -1;
    }
    // SAFETY: the contract.
    unsafe { *memory = new };
    // SAFETY: the contract.
    unsafe { *allocated = requested };
    0
}

/// # Safety
///
/// `memory` was allocated by [`allocate`] and is used no more.
unsafe extern "C" fn free(memory: *mut c_void, _: u32) -> c_int {
    // SAFETY: the contract.
    unsafe { libc::free(memory) };
    0
}
