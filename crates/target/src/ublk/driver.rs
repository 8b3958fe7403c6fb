//! The kernel's end of a queue, as whoever serves it sees it: Linux, or a made-up one.

use std::os::fd::BorrowedFd;

use base::Segment;
use host::ublk::{Ended, Queue};
use wire::ublk::Descriptor;

/// What a queue asks of the kernel. [`Queue`] says what each means.
pub(super) trait Driver: Send {
    fn fetch(&mut self, tag: u16);
    fn commit(&mut self, tag: u16, result: i32);
    fn flush(&mut self);
    fn poll(&mut self, ended: &mut Vec<Ended>);
    fn descriptor(&self, tag: u16) -> Descriptor;
    /// Whether the data of a write lie there now.
    fn copy_in(&mut self, tag: u16, into: Segment) -> bool;
    /// Whether the data of a read have gone from there.
    fn copy_out(&mut self, tag: u16, from: Segment) -> bool;
    fn arm(&mut self) -> bool;
    fn wake_source(&self) -> BorrowedFd<'_>;
}

impl Driver for Queue {
    fn fetch(&mut self, tag: u16) {
        Self::fetch(self, tag);
    }

    #[inline]
    fn commit(&mut self, tag: u16, result: i32) {
        Self::commit(self, tag, result);
    }

    #[inline]
    fn flush(&mut self) {
        Self::flush(self);
    }

    #[inline]
    fn poll(&mut self, ended: &mut Vec<Ended>) {
        Self::poll(self, ended);
    }

    #[inline]
    fn descriptor(&self, tag: u16) -> Descriptor {
        Self::descriptor(self, tag)
    }

    #[inline]
    fn copy_in(&mut self, tag: u16, into: Segment) -> bool {
        Self::copy_in(self, tag, into).is_ok()
    }

    #[inline]
    fn copy_out(&mut self, tag: u16, from: Segment) -> bool {
        Self::copy_out(self, tag, from).is_ok()
    }

    fn arm(&mut self) -> bool {
        Self::arm(self)
    }

    fn wake_source(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(self)
    }
}
