//! Zero-copy sends (`MSG_ZEROCOPY`) and their completion notifications.
//!
//! A send whose segments are long enough is passed to the kernel by reference. The kernel reports
//! on the error queue when it no longer reads the memory, and whether it copied after all, as on
//! loopback: then a stream returns to plain sends, which copy without the cost of notifications.

use std::collections::VecDeque;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::socket_options::set_socket_option;
use crate::io_vectors::last_errno;

/// Smallest average segment length for zero-copy sends. Shared by all streams of a thread.
#[derive(Clone, Debug)]
pub(super) struct ZeroCopyThreshold(Arc<AtomicUsize>);

/// Sends of one stream that the kernel may still read.
#[derive(Debug, Default)]
pub(super) struct PendingZeroCopy {
    sends: VecDeque<PendingSend>,
    /// Sequence number that the kernel assigns to the next send.
    next: u32,
}

#[derive(Debug)]
struct PendingSend {
    /// Position of its first byte in the stream.
    from: u64,
    is_done: bool,
    /// Headers, which the kernel reads too.
    _headers: Box<[u8]>,
}

/// Completion notification: range of sends, and whether they were copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ZeroCopyNotification {
    first: u32,
    last: u32,
    was_copied: bool,
}

impl ZeroCopyThreshold {
    pub(super) fn new(from_bytes: Option<usize>) -> Self {
        let threshold = Self(Arc::default());
        threshold.set(from_bytes);
        threshold
    }

    pub(super) fn set(&self, from_bytes: Option<usize>) {
        self.0.store(from_bytes.unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// Smallest average segment length for zero copy.
    #[inline]
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl PendingZeroCopy {
    /// Records an accepted send, from stream position `from` on.
    pub(super) fn record_send(&mut self, from: u64, headers: Box<[u8]>) {
        self.sends.push_back(PendingSend { from, is_done: false, _headers: headers });
        self.next = self.next.wrapping_add(1);
    }

    /// Whether no send is pending.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.sends.is_empty()
    }

    /// Stream position of the first byte that the kernel may still read.
    pub(super) fn first_pending_position(&self) -> Option<u64> {
        self.sends.front().map(|send| send.from)
    }

    /// Leaks the memory of sends whose notifications will never be read.
    #[cold]
    pub(super) fn leak_pending(&mut self) {
        std::mem::forget(std::mem::take(self));
    }

    /// Reads pending notifications. Returns how many sends were copied.
    pub(super) fn poll_notifications(&mut self, socket: BorrowedFd<'_>) -> u64 {
        let mut copied = 0;
        while let Ok(Some(notice)) = next_notification(socket) {
            copied += self.handle_notification(notice);
        }
        while self.sends.pop_front_if(|send| send.is_done).is_some() {}
        copied
    }

    fn handle_notification(&mut self, notice: ZeroCopyNotification) -> u64 {
        let first_held = self.next.wrapping_sub(u32::try_from(self.sends.len()).unwrap_or(0));
        let mut noted = 0;
        for (send, index) in self.sends.iter_mut().zip(0_u32..) {
            let number = first_held.wrapping_add(index);
            if number.wrapping_sub(notice.first) <= notice.last.wrapping_sub(notice.first) {
                send.is_done = true;
                noted += 1;
            }
        }
        if notice.was_copied { noted } else { 0 }
    }
}

/// Enables zero-copy sends (SO_ZEROCOPY); false if the socket type does not support them.
pub(super) fn enable_zero_copy(socket: BorrowedFd<'_>) -> bool {
    set_socket_option(socket, ("SO_ZEROCOPY", libc::SO_ZEROCOPY), 1).is_ok()
}

/// Makes close discard unsent data (SO_LINGER 0), so that the kernel stops reading held memory.
pub(super) fn discard_on_close(socket: BorrowedFd<'_>) {
    // If the kernel refuses, there is no unsent data.
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(std::time::Duration::ZERO));
}

/// Discards unsent data at once, even if the descriptor is shared.
pub(super) fn abort_connection(socket: BorrowedFd<'_>) {
    discard_on_close(socket);
    if rustix::net::connect_unspec(socket).is_err() {
        // Not TCP, or not connected: there is nothing to discard.
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }
}

/// Size of one control message with an extended error and an address.
const CONTROL_LEN: usize = 128;
const ERROR_LEN: usize = size_of::<libc::sock_extended_err>();
/// `SO_EE_ORIGIN_ZEROCOPY`.
const ORIGIN_ZERO_COPY: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED`.
const CODE_COPIED: u8 = 1;

/// Next notification of the error queue; other errors are skipped.
fn next_notification(socket: BorrowedFd<'_>) -> Result<Option<ZeroCopyNotification>, Errno> {
    let mut control = [0_u64; CONTROL_LEN / 8];
    // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    // `as _`: the field is narrower with musl.
    message.msg_controllen = CONTROL_LEN as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the message names `control`, which is aligned for control messages and of that
    // length, and no data buffer; both outlive the call, and the descriptor is open.
    let answer = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if answer < 0 {
        return Err(last_errno());
    }
    let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(parse_notification(bytes.get(size_of::<libc::cmsghdr>()..).unwrap_or(&[])))
}

/// Decodes a notification from an extended error.
fn parse_notification(error: &[u8]) -> Option<ZeroCopyNotification> {
    let error = error.get(..ERROR_LEN)?;
    let word = |at: usize| Some(u32::from_ne_bytes(error.get(at..at + 4)?.try_into().ok()?));
    let byte = |at: usize| error.get(at).copied();
    let origin = byte(offset_of!(libc::sock_extended_err, ee_origin))?;
    (origin == ORIGIN_ZERO_COPY).then_some(ZeroCopyNotification {
        first: word(offset_of!(libc::sock_extended_err, ee_info))?,
        last: word(offset_of!(libc::sock_extended_err, ee_data))?,
        was_copied: byte(offset_of!(libc::sock_extended_err, ee_code))? & CODE_COPIED != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::{PendingZeroCopy, ZeroCopyNotification};

    fn pending_sends(count: u32, next: u32) -> PendingZeroCopy {
        let mut held = PendingZeroCopy { next, ..PendingZeroCopy::default() };
        (0..u64::from(count)).for_each(|index| held.record_send(index * 100, Box::default()));
        held
    }

    fn notify_and_first_pending(
        held: &mut PendingZeroCopy,
        first: u32,
        last: u32,
        was_copied: bool,
    ) -> (u64, Option<u64>) {
        let copied = held.handle_notification(ZeroCopyNotification { first, last, was_copied });
        while held.sends.pop_front_if(|send| send.is_done).is_some() {}
        (copied, held.first_pending_position())
    }

    #[test]
    fn memory_is_released_in_order_for_any_notification_order() {
        // The sequence numbers wrap.
        for start in [0, 1000, u32::MAX - 1] {
            let mut held = pending_sends(4, start);
            let at = |index| start.wrapping_add(index);
            assert_eq!(notify_and_first_pending(&mut held, at(1), at(2), false), (0, Some(0)));
            assert_eq!(notify_and_first_pending(&mut held, at(0), at(0), true), (1, Some(300)));
            assert_eq!(
                notify_and_first_pending(&mut held, at(0), at(2), true),
                (0, Some(300)),
                "old news"
            );
            assert_eq!(notify_and_first_pending(&mut held, at(3), at(3), true), (1, None));
        }
    }
}
