//! Safe types over librados and librbd, which are loaded at run time: the only unsafe code of this crate.
//!
//! | type | object of the library |
//! |---|---|
//! | [`Functions`] | the functions of both libraries |
//! | [`Connection`] | `rados_t`, a connection to a cluster |
//! | [`PoolContext`] | `rados_ioctx_t`, a pool and a namespace in it |
//! | [`ObjectWatch`] | a watch of an object, and [`Notification`], what it waits for |
//! | [`Image`] | `rbd_image_t`, an open image |
//! | [`IoRecord`] | what a request in flight needs until its completion |
//!
//! What this module guarantees:
//!
//! - A function is called with the signature of the header of its library, and only with handles that the
//!   library returned and that were not closed. A connection outlives its pool contexts, and both outlive
//!   the images opened through them.
//! - The memory of a request was resolved by the region table of the image, of which the image keeps a
//!   handle. All else that librbd accesses until a completion, the address list included, belongs to the
//!   [`IoRecord`], which librbd owns from the submission on. The record of a request that never completes
//!   is never freed.
//! - No callback runs code of this program, except those that report a change of an image's header or a
//!   notification of an object. They store a word, signal an event descriptor and confirm the notification,
//!   and their argument is freed after the library has confirmed that no further call follows.
//! - No panic crosses into the libraries: callbacks call nothing that may panic.

mod connection;
#[cfg(test)]
pub(crate) mod fake;
mod functions;
mod image;
mod image_administration;
mod io_record;
mod object;
mod object_watch;

pub(crate) use self::connection::{ConnectStep, Connection, ConnectionOptions, PoolContext};
pub(crate) use self::functions::Functions;
pub(crate) use self::image::{Image, ImageLayout, OpenMode};
pub use self::image_administration::{ImageSpec, SnapshotRow};
pub(crate) use self::io_record::{IoRecord, SubmitError};
pub(crate) use self::object::ObjectChange;
pub(crate) use self::object_watch::{Notification, ObjectWatch};

use std::ffi::{CStr, CString, c_char, c_int};

/// An error number of the libraries, positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CephErrno(pub(crate) i32);

/// The value of a call that returns a negative error number.
fn check(returned: c_int) -> Result<c_int, CephErrno> {
    if returned < 0 { Err(CephErrno(-returned)) } else { Ok(returned) }
}

/// A C string; a text with a NUL byte is an invalid argument for Ceph.
fn c_string(text: &str) -> Result<CString, CephErrno> {
    CString::new(text).map_err(|_| CephErrno(libc::EINVAL))
}

/// The text in a buffer that a call has filled, up to its NUL byte.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// A copy of a C string of librbd; empty if it is null.
fn owned_text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: it is not null, so librbd has stored a C string there, which it does not change.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
