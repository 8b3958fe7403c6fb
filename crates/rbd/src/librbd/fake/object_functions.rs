//! Objects and their maps: the fake has none, so these functions fail or do nothing. They are tested on a real cluster.

use std::ffi::{c_char, c_int, c_void};

use crate::librbd::functions::{
    AioCallback, AioCompletion, Ioctx, OmapIterator, Rados, ReadOp, WatchCallback,
    WatchErrorCallback, WriteOp,
};

pub(super) unsafe extern "C" fn create_op() -> *mut c_void {
    std::ptr::null_mut()
}
pub(super) unsafe extern "C" fn release_op(_: *mut c_void) {}
pub(super) unsafe extern "C" fn omap_get_vals(
    _: ReadOp,
    _: *const c_char,
    _: *const c_char,
    _: u64,
    _: *mut OmapIterator,
    _: *mut u8,
    _: *mut c_int,
) {
}
pub(super) unsafe extern "C" fn read_operate(
    _: ReadOp,
    _: Ioctx,
    _: *const c_char,
    _: c_int,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn omap_get_next(
    _: OmapIterator,
    _: *mut *mut c_char,
    _: *mut *mut c_char,
    _: *mut usize,
    _: *mut usize,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn op_create(_: WriteOp, _: c_int, _: *const c_char) {}
pub(super) unsafe extern "C" fn omap_cmp(
    _: WriteOp,
    _: *const c_char,
    _: u8,
    _: *const c_char,
    _: usize,
    _: usize,
    _: *mut c_int,
) {
}
pub(super) unsafe extern "C" fn omap_set(
    _: WriteOp,
    _: *const *const c_char,
    _: *const *const c_char,
    _: *const usize,
    _: *const usize,
    _: usize,
) {
}
pub(super) unsafe extern "C" fn omap_rm_keys(
    _: WriteOp,
    _: *const *const c_char,
    _: *const usize,
    _: usize,
) {
}
pub(super) unsafe extern "C" fn write_operate(
    _: WriteOp,
    _: Ioctx,
    _: *const c_char,
    _: *mut libc::time_t,
    _: c_int,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn lock_shared(
    _: Ioctx,
    _: *const c_char,
    _: *const c_char,
    _: *const c_char,
    _: *const c_char,
    _: *const c_char,
    _: *mut libc::timeval,
    _: u8,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn unlock(
    _: Ioctx,
    _: *const c_char,
    _: *const c_char,
    _: *const c_char,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn list_lockers(
    _: Ioctx,
    _: *const c_char,
    _: *const c_char,
    _: *mut c_int,
    _: *mut c_char,
    _: *mut usize,
    _: *mut c_char,
    _: *mut usize,
    _: *mut c_char,
    _: *mut usize,
    _: *mut c_char,
    _: *mut usize,
) -> isize {
    -(libc::EOPNOTSUPP as isize)
}
pub(super) unsafe extern "C" fn watch3(
    _: Ioctx,
    _: *const c_char,
    _: *mut u64,
    _: WatchCallback,
    _: WatchErrorCallback,
    _: u32,
    _: *mut c_void,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn unwatch2(_: Ioctx, _: u64) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn watch_flush(_: Rados) -> c_int {
    0
}
pub(super) unsafe extern "C" fn notify_ack(
    _: Ioctx,
    _: *const c_char,
    _: u64,
    _: u64,
    _: *const c_char,
    _: c_int,
) -> c_int {
    0
}
pub(super) unsafe extern "C" fn aio_create(
    _: *mut c_void,
    _: Option<AioCallback>,
    _: *mut AioCompletion,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn aio_notify(
    _: Ioctx,
    _: *const c_char,
    _: AioCompletion,
    _: *const c_char,
    _: c_int,
    _: u64,
    _: *mut *mut c_char,
    _: *mut usize,
) -> c_int {
    -libc::EOPNOTSUPP
}
pub(super) unsafe extern "C" fn aio_result(_: AioCompletion) -> c_int {
    0
}
