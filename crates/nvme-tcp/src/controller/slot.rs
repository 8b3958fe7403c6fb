//! Outstanding command of the controller side.

use tenmil_wire::Completion;

/// Largest number of outstanding R2Ts per command.
pub(super) const ASKS: u8 = 4;

/// Slot of the command table. Of the fields that count bytes, only those of one direction are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandSlot {
    /// Completion, once `is_answered`.
    pub(super) completion: Completion,
    /// Length of its data.
    pub(super) len_bytes: u32,
    /// Bytes of these for which the owner has granted a buffer, or which are ready to be sent.
    pub(super) ready: u32,
    /// Bytes requested, or queued to be sent.
    pub(super) asked: u32,
    /// Bytes received.
    pub(super) came: u32,
    /// Start of the oldest requested range.
    pub(super) ask_begin: u32,
    /// Ends of the requested ranges; the oldest is at `ask_first`.
    pub(super) ask_ends: [u32; ASKS as usize],
    pub(super) asks: u8,
    pub(super) ask_first: u8,
    pub(super) cid: u16,
    pub(super) state: TransferState,
    /// Whether the slot is in the list of slots to send. Stays set when the tag is reused.
    pub(super) is_queued: bool,
    /// Whether the owner has completed the command.
    pub(super) is_answered: bool,
    /// Whether the response is queued.
    pub(super) is_sent: bool,
    /// Whether a data digest was wrong.
    pub(super) is_damaged: bool,
}

/// Direction and stage of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferState {
    /// The slot is free.
    Free,
    /// No data, or they arrived in the capsule.
    NoData,
    /// In-capsule data are being received.
    InCapsule,
    /// Data are requested from the host.
    FromHost,
    /// Data are sent to the host.
    ToHost,
}

impl CommandSlot {
    pub(super) const FREE: Self = Self {
        completion: Completion([0; 4]),
        len_bytes: 0,
        ready: 0,
        asked: 0,
        came: 0,
        ask_begin: 0,
        ask_ends: [0; ASKS as usize],
        asks: 0,
        ask_first: 0,
        cid: 0,
        state: TransferState::Free,
        is_queued: false,
        is_answered: false,
        is_sent: false,
        is_damaged: false,
    };

    /// Takes a new command. Ranges and the completion are set when there are some, and a place in the
    /// list of slots to send remains.
    #[inline]
    pub(super) fn begin(&mut self, cid: u16, state: TransferState, len_bytes: u32) {
        (self.cid, self.state, self.len_bytes) = (cid, state, len_bytes);
        (self.ready, self.asked, self.came, self.ask_begin) = (0, 0, 0, 0);
        (self.asks, self.ask_first) = (0, 0);
        (self.is_answered, self.is_sent, self.is_damaged) = (false, false, false);
    }

    /// Whether its owner still has to complete it.
    pub(super) fn is_in_flight(&self) -> bool {
        self.state != TransferState::Free && !self.is_answered
    }

    /// Whether data are in transfer, requested or in the capsule.
    pub(super) fn is_receiving(&self) -> bool {
        self.state == TransferState::InCapsule || self.asks > 0
    }

    /// Whether no data are in transfer in either direction.
    pub(super) fn is_still(&self) -> bool {
        match self.state {
            TransferState::Free | TransferState::NoData => true,
            TransferState::InCapsule => false,
            TransferState::FromHost => self.came == self.len_bytes,
            TransferState::ToHost => self.ready == 0,
        }
    }

    /// Oldest requested range.
    pub(super) fn oldest_r2t(&self) -> (u32, u32) {
        (self.ask_begin, self.ask_ends[usize::from(self.ask_first)])
    }

    /// Adds a requested range.
    pub(super) fn push_ask(&mut self, end: u32) {
        let place = (self.ask_first + self.asks) % ASKS;
        self.ask_ends[usize::from(place)] = end;
        self.asks += 1;
        self.asked = end;
    }

    /// Removes the oldest range, which has arrived completely.
    pub(super) fn pop_ask(&mut self) {
        self.ask_begin = self.ask_ends[usize::from(self.ask_first)];
        self.ask_first = (self.ask_first + 1) % ASKS;
        self.asks -= 1;
    }
}
