//! When to send without copying, and when what was sent so is nobody's any more.
//!
//! A send whose pieces of memory are long enough is given to the kernel by reference (`MSG_ZEROCOPY`). It says
//! on the error queue when it has let go of it, and whether it had copied after all, as it does on
//! loopback: then a stream goes back to plain sends, which copy without the talk about it.

use std::collections::VecDeque;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::options::set_number;
use crate::vectored::last_errno;

/// From how many bytes on a thread's streams send without copying. Shared by all of them.
#[derive(Clone, Debug)]
pub(super) struct Threshold(Arc<AtomicUsize>);

/// The sends of one stream that the kernel may still read.
#[derive(Debug, Default)]
pub(super) struct Held {
    sends: VecDeque<HeldSend>,
    /// The number that the kernel gives the next one.
    next: u32,
}

#[derive(Debug)]
struct HeldSend {
    /// The first byte of it, of all that were ever taken.
    from: u64,
    is_done: bool,
    /// The kernel reads these as well.
    _headers: Box<[u8]>,
}

/// What the kernel says about sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Notice {
    first: u32,
    last: u32,
    was_copied: bool,
}

impl Threshold {
    pub(super) fn new(from_bytes: Option<usize>) -> Self {
        let threshold = Self(Arc::default());
        threshold.set(from_bytes);
        threshold
    }

    pub(super) fn set(&self, from_bytes: Option<usize>) {
        self.0.store(from_bytes.unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// How long pieces of memory must be to be worth it.
    #[inline]
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Held {
    /// A send was taken, from byte `from` of all on.
    pub(super) fn push(&mut self, from: u64, headers: Box<[u8]>) {
        self.sends.push_back(HeldSend { from, is_done: false, _headers: headers });
        self.next = self.next.wrapping_add(1);
    }

    /// Whether the kernel holds nothing.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.sends.is_empty()
    }

    /// The first byte that the kernel may still read, if there is one.
    pub(super) fn first(&self) -> Option<u64> {
        self.sends.front().map(|send| send.from)
    }

    /// The kernel has not let go of all that it names, and nobody asks any more: that stays for ever.
    #[cold]
    pub(super) fn keep(&mut self) {
        std::mem::forget(std::mem::take(self));
    }

    /// Takes what the kernel says. Returns how many sends it had copied.
    pub(super) fn look(&mut self, socket: BorrowedFd<'_>) -> u64 {
        let mut copied = 0;
        while let Ok(Some(notice)) = take_notice(socket) {
            copied += self.note(notice);
        }
        while self.sends.pop_front_if(|send| send.is_done).is_some() {}
        copied
    }

    fn note(&mut self, notice: Notice) -> u64 {
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

/// Has a socket take sends by reference. An error says that this kind of socket does not.
pub(super) fn allow(socket: BorrowedFd<'_>) -> bool {
    set_number(socket, ("SO_ZEROCOPY", libc::SO_ZEROCOPY), 1).is_ok()
}

/// Has the end of a socket throw away what was not sent: memory that is held is read no more.
pub(super) fn abort_at_end(socket: BorrowedFd<'_>) {
    // If the kernel refuses that, it has nothing to throw away.
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(std::time::Duration::ZERO));
}

/// Throws away what was not sent, at once, whoever else has the socket.
pub(super) fn abort(socket: BorrowedFd<'_>) {
    abort_at_end(socket);
    if rustix::net::connect_unspec(socket).is_err() {
        // Not TCP. One that is not connected has nothing to throw away.
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }
}

/// Room for one control message with an extended error and the address behind it.
const CONTROL_LEN: usize = 128;
const ERROR_LEN: usize = size_of::<libc::sock_extended_err>();
/// `SO_EE_ORIGIN_ZEROCOPY`.
const ORIGIN_ZERO_COPY: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED`.
const CODE_COPIED: u8 = 1;

/// The next message of a socket's error queue; other errors than notices are skipped.
fn take_notice(socket: BorrowedFd<'_>) -> Result<Option<Notice>, Errno> {
    let mut control = [0_u64; CONTROL_LEN / 8];
    // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_LEN;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the message names `control`, aligned for control messages and of that length, and no
    // memory for data; both outlive the call, and the descriptor is open.
    let answer = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if answer < 0 {
        return Err(last_errno());
    }
    let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(notice(bytes.get(size_of::<libc::cmsghdr>()..).unwrap_or(&[])))
}

/// A notice in an extended error.
fn notice(error: &[u8]) -> Option<Notice> {
    let error = error.get(..ERROR_LEN)?;
    let word = |at: usize| Some(u32::from_ne_bytes(error.get(at..at + 4)?.try_into().ok()?));
    let byte = |at: usize| error.get(at).copied();
    let origin = byte(offset_of!(libc::sock_extended_err, ee_origin))?;
    (origin == ORIGIN_ZERO_COPY).then_some(Notice {
        first: word(offset_of!(libc::sock_extended_err, ee_info))?,
        last: word(offset_of!(libc::sock_extended_err, ee_data))?,
        was_copied: byte(offset_of!(libc::sock_extended_err, ee_code))? & CODE_COPIED != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::{Held, Notice};

    fn held(count: u32, next: u32) -> Held {
        let mut held = Held { next, ..Held::default() };
        (0..u64::from(count)).for_each(|index| held.push(index * 100, Box::default()));
        held
    }

    fn released(held: &mut Held, first: u32, last: u32, was_copied: bool) -> (u64, Option<u64>) {
        let copied = held.note(Notice { first, last, was_copied });
        while held.sends.pop_front_if(|send| send.is_done).is_some() {}
        (copied, held.first())
    }

    #[test]
    fn memory_is_released_in_order_whatever_the_order_of_notices() {
        // The numbers go round.
        for start in [0, 1000, u32::MAX - 1] {
            let mut held = held(4, start);
            let at = |index| start.wrapping_add(index);
            assert_eq!(released(&mut held, at(1), at(2), false), (0, Some(0)));
            assert_eq!(released(&mut held, at(0), at(0), true), (1, Some(300)));
            assert_eq!(released(&mut held, at(0), at(2), true), (0, Some(300)), "old news");
            assert_eq!(released(&mut held, at(3), at(3), true), (1, None));
        }
    }
}
