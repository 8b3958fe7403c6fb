//! What the ring has of one socket.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use base::{NoSuchMemory, Stretch};
use dma::Regions;
use io_uring::types;
use rustix::io::Errno;

use super::buffers::Lent;
use super::outgoing::Outgoing;
use crate::socket::zero_copy::abort;

/// What the ring has of one socket. Kept until the kernel has ended all that it names.
pub(super) struct Slot {
    socket: OwnedFd,
    /// Keeps mapped what sends name.
    regions: Regions,
    pub(super) is_attached: bool,
    /// Its place in the kernel's table.
    pub(super) file: Option<types::Fixed>,
    pub(super) is_receiving: bool,
    /// The receive goes on by itself.
    pub(super) goes_on: bool,
    /// What has come, oldest first.
    pub(super) arrived: VecDeque<Lent>,
    /// Why nothing comes any more.
    pub(super) over: Option<Over>,
    /// By number.
    #[expect(clippy::vec_box, reason = "not moved: the kernel has their addresses")]
    pub(super) sends: Vec<Box<Outgoing>>,
    /// Whether sends by reference are worth trying.
    by_reference: bool,
    /// Why nothing can be sent any more.
    pub(super) broken: Option<Errno>,
    /// What the stream sleeps for.
    pub(super) wants_bytes: bool,
    pub(super) wants_room: bool,
    /// Sends nothing any more, once what is under way has gone.
    pub(super) is_shut: bool,
    /// The stream is no more.
    pub(super) is_gone: bool,
    /// Bytes that were ever taken.
    pub(super) taken: u64,
}

/// Why nothing comes any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    End,
    Broken(Errno),
}

/// `IORING_NOTIF_USAGE_ZC_COPIED`.
const NOTICE_COPIED: u32 = 1 << 31;
/// Sends that the kernel may still read, at most.
const SENDS_MAX: usize = 16;

impl Slot {
    pub(super) fn new(socket: OwnedFd, regions: Regions) -> Self {
        Self {
            socket,
            regions,
            is_attached: false,
            file: None,
            is_receiving: false,
            goes_on: false,
            arrived: VecDeque::new(),
            over: None,
            sends: Vec::new(),
            by_reference: true,
            broken: None,
            wants_bytes: false,
            wants_room: false,
            is_shut: false,
            is_gone: false,
            taken: 0,
        }
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether the kernel has nothing of it.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_receiving && self.sends.iter().all(|send| send.is_free())
    }

    /// The sends that are not on their way yet.
    pub(super) fn sending(&self) -> impl Iterator<Item = u8> {
        let sends = self.sends.iter().zip(0_u8..);
        sends.filter(|(send, _)| send.is_sending).map(|(_, number)| number)
    }

    /// Fills a send with as many of `stretches` as go at once. Returns its number and how many bytes
    /// that are; none if the one before is not on its way yet, or too much is held.
    pub(super) fn fill(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
        by_reference: bool,
    ) -> Result<Option<(u8, usize)>, NoSuchMemory> {
        if self.sending().next().is_some() {
            return Ok(None);
        }
        let free = self.sends.iter().position(|send| send.is_free());
        let index = match free {
            Some(index) => index,
            None if self.sends.len() == SENDS_MAX => return Ok(None),
            None => {
                self.sends.push(Box::new(Outgoing::new()));
                self.sends.len() - 1
            }
        };
        let send = &mut self.sends[index];
        let len = send.fill(&self.regions, headers, stretches, has_more)?;
        if len > 0 {
            send.is_sending = true;
            send.by_reference = by_reference && self.by_reference;
            send.from = self.taken;
            self.taken += len as u64;
        }
        Ok((len > 0).then_some((u8::try_from(index).unwrap_or(u8::MAX), len)))
    }

    /// The kernel has let go of something. Returns whether it had copied it.
    pub(super) fn noticed(&mut self, number: u8, result: i32) -> bool {
        let send = &mut self.sends[usize::from(number)];
        send.notices -= 1;
        let was_copied = result.cast_unsigned() & NOTICE_COPIED != 0;
        self.by_reference &= !was_copied;
        was_copied
    }

    /// The kernel has answered a send. Returns whether it must be asked again for the rest.
    pub(super) fn sent(&mut self, number: u8, result: i32, is_noticed_later: bool) -> bool {
        let send = &mut self.sends[usize::from(number)];
        send.notices += u32::from(is_noticed_later);
        let errno = (result < 0).then(|| Errno::from_raw_os_error(-result));
        let count = usize::try_from(result).unwrap_or(0);
        match errno {
            // Memory of a stream that has gone is sent no more of.
            _ if self.is_gone => {}
            None if send.advance(count) => return true,
            Some(Errno::INTR | Errno::AGAIN) => return true,
            Some(Errno::OPNOTSUPP | Errno::NOBUFS | Errno::NOMEM) if send.by_reference => {
                // This kind of socket does not, or no more memory may be locked.
                (send.by_reference, self.by_reference) = (false, false);
                return true;
            }
            Some(errno) => self.broken = self.broken.or(Some(errno)),
            None => {}
        }
        send.is_sending = false;
        if self.is_shut && self.sending().next().is_none() {
            self.shut_down();
        }
        false
    }

    /// Sends nothing any more, as soon as what is under way has gone.
    pub(super) fn shut_down(&mut self) {
        self.is_shut = true;
        if self.sending().next().is_none() {
            // A peer that has gone already is told nothing.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
        }
    }

    /// So many bytes, from the first on, the kernel reads no more.
    pub(super) fn released(&self) -> u64 {
        let held = self.sends.iter().filter(|send| !send.is_free());
        held.map(|send| send.from).min().unwrap_or(self.taken)
    }
    /// Whether the kernel reads no memory any more that was taken to be sent.
    pub(super) fn has_released(&self) -> bool {
        self.released() == self.taken
    }

    /// Throws away what was not sent, at once: neither the ring nor its table keeps a connection.
    pub(super) fn abort(&mut self) {
        self.broken.get_or_insert(Errno::CONNABORTED);
        abort(self.socket());
    }
}
