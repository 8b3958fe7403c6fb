//! Interface to the kernel's side of a queue, implemented by Linux and by a test double.

use std::os::fd::BorrowedFd;

use tenmil_base::Segment;
use tenmil_linux::ublk::{FetchedTag, UblkQueue};
use tenmil_wire::ublk::IoDescriptor;

/// Operations on a ublk queue, with the semantics of a ublk server of Linux.
pub(super) trait QueueDriver: Send {
    fn fetch(&mut self, tag: u16);
    fn commit_and_fetch(&mut self, tag: u16, result: i32);
    fn flush(&mut self);
    fn poll(&mut self, fetched: &mut Vec<FetchedTag>);
    fn descriptor(&self, tag: u16) -> IoDescriptor;
    /// Copies the data of a write into a buffer. Returns whether that succeeded.
    fn copy_from_kernel(&mut self, tag: u16, into: Segment) -> bool;
    /// Copies the data of a read out of a buffer. Returns whether that succeeded.
    fn copy_to_kernel(&mut self, tag: u16, from: Segment) -> bool;
    fn arm(&mut self) -> bool;
    fn wake_source(&self) -> BorrowedFd<'_>;
}

impl QueueDriver for UblkQueue {
    fn fetch(&mut self, tag: u16) {
        Self::fetch_request(self, tag);
    }

    #[inline]
    fn commit_and_fetch(&mut self, tag: u16, result: i32) {
        Self::commit_and_fetch(self, tag, result);
    }

    #[inline]
    fn flush(&mut self) {
        Self::submit_pushed_commands(self);
    }

    #[inline]
    fn poll(&mut self, fetched: &mut Vec<FetchedTag>) {
        Self::poll(self, fetched);
    }

    #[inline]
    fn descriptor(&self, tag: u16) -> IoDescriptor {
        Self::descriptor(self, tag)
    }

    #[inline]
    fn copy_from_kernel(&mut self, tag: u16, into: Segment) -> bool {
        Self::copy_from_request(self, tag, into).is_ok()
    }

    #[inline]
    fn copy_to_kernel(&mut self, tag: u16, from: Segment) -> bool {
        Self::copy_to_request(self, tag, from).is_ok()
    }

    fn arm(&mut self) -> bool {
        Self::arm(self)
    }

    fn wake_source(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(self)
    }
}
