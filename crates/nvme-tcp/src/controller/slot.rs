//! Outstanding command of the controller side.

use tenmil_wire::Completion;

/// Largest number of outstanding R2Ts per command.
pub(super) const R2TS_MAX: u8 = 4;

/// Slot of the command table. Of the fields that count bytes, only those of one direction are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandSlot {
    /// Completion, once `is_completed`.
    pub(super) completion: Completion,
    /// Length of its data.
    pub(super) len_bytes: u32,
    /// Bytes of these that may be transferred: a buffer is allocated, or the data are ready to be sent.
    pub(super) ready: u32,
    /// Bytes requested with R2Ts, or queued to be sent.
    pub(super) issued: u32,
    /// Bytes received.
    pub(super) received: u32,
    /// Start of the oldest requested range.
    pub(super) r2t_begin: u32,
    /// Ends of the requested ranges; the oldest is at `r2t_first`.
    pub(super) r2t_ends: [u32; R2TS_MAX as usize],
    pub(super) r2t_count: u8,
    pub(super) r2t_first: u8,
    pub(super) cid: u16,
    pub(super) state: TransferState,
    /// Whether the slot is in the list of slots to send. Stays set when the tag is reused.
    pub(super) is_in_send_list: bool,
    /// Whether the owner has completed the command.
    pub(super) is_completed: bool,
    /// Whether the response is queued.
    pub(super) is_response_queued: bool,
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
        issued: 0,
        received: 0,
        r2t_begin: 0,
        r2t_ends: [0; R2TS_MAX as usize],
        r2t_count: 0,
        r2t_first: 0,
        cid: 0,
        state: TransferState::Free,
        is_in_send_list: false,
        is_completed: false,
        is_response_queued: false,
        is_damaged: false,
    };

    /// Assigns a new command. R2T ranges and the completion are written before they are read, and
    /// `is_in_send_list` stays.
    #[inline]
    pub(super) fn assign_command(&mut self, cid: u16, state: TransferState, len_bytes: u32) {
        (self.cid, self.state, self.len_bytes) = (cid, state, len_bytes);
        (self.ready, self.issued, self.received, self.r2t_begin) = (0, 0, 0, 0);
        (self.r2t_count, self.r2t_first) = (0, 0);
        (self.is_completed, self.is_response_queued, self.is_damaged) = (false, false, false);
    }

    /// Whether the owner has not completed the command yet.
    pub(super) fn is_outstanding(&self) -> bool {
        self.state != TransferState::Free && !self.is_completed
    }

    /// Whether data are in transfer, requested or in the capsule.
    pub(super) fn is_receiving(&self) -> bool {
        self.state == TransferState::InCapsule || self.r2t_count > 0
    }

    /// Whether no data are in transfer in either direction.
    pub(super) fn is_data_idle(&self) -> bool {
        match self.state {
            TransferState::Free | TransferState::NoData => true,
            TransferState::InCapsule => false,
            TransferState::FromHost => self.received == self.len_bytes,
            TransferState::ToHost => self.ready == 0,
        }
    }

    /// Oldest requested range.
    pub(super) fn oldest_r2t(&self) -> (u32, u32) {
        (self.r2t_begin, self.r2t_ends[usize::from(self.r2t_first)])
    }

    /// Adds a requested range.
    pub(super) fn add_r2t_range(&mut self, end: u32) {
        let index = (self.r2t_first + self.r2t_count) % R2TS_MAX;
        self.r2t_ends[usize::from(index)] = end;
        self.r2t_count += 1;
        self.issued = end;
    }

    /// Removes the oldest range, which has arrived completely.
    pub(super) fn remove_oldest_r2t(&mut self) {
        self.r2t_begin = self.r2t_ends[usize::from(self.r2t_first)];
        self.r2t_first = (self.r2t_first + 1) % R2TS_MAX;
        self.r2t_count -= 1;
    }
}
