//! Per-socket state of the ring.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use io_uring::types;
use rustix::io::Errno;
use tenmil_base::{InvalidSegment, SendSlice};
use tenmil_dma::RegionTable;

use super::provided_buffers::FilledBuffer;
use super::send_op::SendOp;
use crate::socket::zero_copy::abort_connection;

/// Per-socket state of the ring. Kept until the kernel has completed every operation that refers to
/// it.
pub(super) struct SocketSlot {
    socket: OwnedFd,
    /// Keeps mapped what sends refer to.
    regions: RegionTable,
    pub(super) is_attached: bool,
    /// Index in the kernel's file table.
    pub(super) file: Option<types::Fixed>,
    pub(super) is_receiving: bool,
    /// The receive in flight is multishot.
    pub(super) is_multishot: bool,
    /// Received buffers, oldest first.
    pub(super) arrived: VecDeque<FilledBuffer>,
    /// Reason why nothing more is received.
    pub(super) end: Option<StreamEnd>,
    /// Sends, by number.
    #[expect(clippy::vec_box, reason = "not moved: the kernel has their addresses")]
    pub(super) sends: Vec<Box<SendOp>>,
    /// Whether zero-copy sends are attempted.
    zero_copy: bool,
    /// Reason why nothing more can be sent.
    pub(super) broken: Option<Errno>,
    /// Events that the stream sleeps for.
    pub(super) wants_bytes: bool,
    pub(super) wants_space: bool,
    /// The write side is shut down once all sends have completed.
    pub(super) is_shut: bool,
    /// The stream was dropped.
    pub(super) is_closed: bool,
    /// Bytes ever accepted for sending.
    pub(super) taken: u64,
}

/// Reason why nothing more is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEnd {
    End,
    Broken(Errno),
}

/// `IORING_NOTIF_USAGE_ZC_COPIED`.
const NOTICE_COPIED: u32 = 1 << 31;
/// Maximum number of sends that the kernel may still read.
const SENDS_MAX: usize = 16;

impl SocketSlot {
    pub(super) fn new(socket: OwnedFd, regions: RegionTable) -> Self {
        Self {
            socket,
            regions,
            is_attached: false,
            file: None,
            is_receiving: false,
            is_multishot: false,
            arrived: VecDeque::new(),
            end: None,
            sends: Vec::new(),
            zero_copy: true,
            broken: None,
            wants_bytes: false,
            wants_space: false,
            is_shut: false,
            is_closed: false,
            taken: 0,
        }
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub(super) fn socket_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether the kernel has no operation in flight for it.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_receiving && self.sends.iter().all(|send| send.is_free())
    }

    /// Sends that are filled but not complete.
    pub(super) fn sends_in_flight(&self) -> impl Iterator<Item = u8> {
        let sends = self.sends.iter().zip(0_u8..);
        sends.filter(|(send, _)| send.is_sending).map(|(_, number)| number)
    }

    /// Fills a send with as many of `stretches` as one call takes. Returns its number and its
    /// length; `None` if the previous one is not complete yet, or too many are pending.
    pub(super) fn fill_send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
        by_reference: bool,
    ) -> Result<Option<(u8, usize)>, InvalidSegment> {
        if self.sends_in_flight().next().is_some() {
            return Ok(None);
        }
        // A complete send occupies its entry until its zero-copy notification has arrived.
        let free = self.sends.iter().position(|send| send.is_free());
        let index = match free {
            Some(index) => index,
            None if self.sends.len() == SENDS_MAX => return Ok(None),
            None => {
                self.sends.push(Box::new(SendOp::new()));
                self.sends.len() - 1
            }
        };
        let send = &mut self.sends[index];
        let len = send.fill_from(&self.regions, headers, stretches, has_more)?;
        if len > 0 {
            send.is_sending = true;
            send.zero_copy = by_reference && self.zero_copy;
            send.from = self.taken;
            self.taken += len as u64;
        }
        Ok((len > 0).then_some((u8::try_from(index).unwrap_or(u8::MAX), len)))
    }

    /// Handles a zero-copy notification. Returns whether the data was copied.
    pub(super) fn handle_notification(&mut self, number: u8, result: i32) -> bool {
        let send = &mut self.sends[usize::from(number)];
        send.notifications -= 1;
        let was_copied = result.cast_unsigned() & NOTICE_COPIED != 0;
        self.zero_copy &= !was_copied;
        was_copied
    }

    /// Handles the completion of a send. Returns whether the rest must be submitted again.
    pub(super) fn handle_send_completion(
        &mut self,
        number: u8,
        result: i32,
        is_noticed_later: bool,
    ) -> bool {
        let send = &mut self.sends[usize::from(number)];
        send.notifications += u32::from(is_noticed_later);
        let errno = (result < 0).then(|| Errno::from_raw_os_error(-result));
        let count = usize::try_from(result).unwrap_or(0);
        match errno {
            // Nothing more is sent from the memory of a dropped stream.
            _ if self.is_closed => {}
            None if send.record_sent(count) => return true,
            Some(Errno::INTR | Errno::AGAIN) => return true,
            Some(Errno::OPNOTSUPP | Errno::NOBUFS | Errno::NOMEM) if send.zero_copy => {
                // The socket does not support zero copy, or the locked-memory limit is reached.
                (send.zero_copy, self.zero_copy) = (false, false);
                return true;
            }
            Some(errno) => self.broken = self.broken.or(Some(errno)),
            None => {}
        }
        send.is_sending = false;
        if self.is_shut && self.sends_in_flight().next().is_none() {
            self.shutdown_write();
        }
        false
    }

    /// Shuts the write side down once all sends have completed.
    pub(super) fn shutdown_write(&mut self) {
        self.is_shut = true;
        if self.sends_in_flight().next().is_none() {
            // Fails if the peer has closed already.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
        }
    }

    /// Stream position below which the kernel no longer reads memory.
    pub(super) fn released_position(&self) -> u64 {
        let held = self.sends.iter().filter(|send| !send.is_free());
        held.map(|send| send.from).min().unwrap_or(self.taken)
    }
    /// Whether the kernel no longer reads any memory accepted for sending.
    pub(super) fn has_released(&self) -> bool {
        self.released_position() == self.taken
    }

    /// Discards unsent data at once and resets the connection, although the ring still refers to
    /// the socket.
    pub(super) fn abort(&mut self) {
        self.broken.get_or_insert(Errno::CONNABORTED);
        abort_connection(self.socket_fd());
    }
}
