//! Outstanding command of the host side.

use tenmil_wire::Completion;

/// Slot of the command table.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandSlot {
    /// Stream offset at which the last byte queued for the command ends.
    pub(super) stream_end: u64,
    /// Completion, if the response arrived before everything was sent.
    pub(super) completion: Completion,
    /// Length of its data.
    pub(super) len_bytes: u32,
    /// Bytes of these received, or queued to be sent.
    pub(super) transferred: u32,
    /// Bytes requested by the controller with R2Ts.
    pub(super) requested: u32,
    /// Identifier on the wire.
    pub(super) cid: u16,
    /// Number of requested ranges that are not queued; the oldest is at `r2t_first`.
    pub(super) r2t_count: u8,
    pub(super) r2t_first: u8,
    pub(super) state: TransferState,
    /// Whether the slot is in the list of slots to send. Stays set when the tag is reused.
    pub(super) is_in_send_list: bool,
    /// Whether LAST_PDU was received.
    pub(super) is_last: bool,
    /// Whether a data digest was wrong.
    pub(super) is_damaged: bool,
}

/// State of a command: the events it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferState {
    /// The slot is free.
    Free,
    /// The response.
    AwaitResponse,
    /// Data, then the response.
    Data,
    /// R2Ts, then the response.
    AwaitR2t,
    /// Nothing from the controller: the rest of its data is being sent.
    Sent,
}

/// Range requested by an R2T.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct R2tRange {
    /// End of the range.
    pub(super) end: u32,
    /// TTAG that its data must carry.
    pub(super) ttag: u16,
}

impl CommandSlot {
    pub(super) const FREE: Self = Self {
        stream_end: 0,
        completion: Completion([0; 4]),
        len_bytes: 0,
        transferred: 0,
        requested: 0,
        cid: 0,
        r2t_count: 0,
        r2t_first: 0,
        state: TransferState::Free,
        is_in_send_list: false,
        is_last: false,
        is_damaged: false,
    };

    /// Assigns a command that is queued up to `stream_end`.
    #[inline(always)]
    pub(super) fn assign_command(
        &mut self,
        cid: u16,
        state: TransferState,
        len_bytes: u32,
        stream_end: u64,
    ) {
        // `is_in_send_list` stays, and `completion` is written before it is read.
        (self.stream_end, self.cid, self.state) = (stream_end, cid, state);
        (self.len_bytes, self.transferred, self.requested) = (len_bytes, 0, 0);
        (self.r2t_count, self.r2t_first) = (0, 0);
        (self.is_last, self.is_damaged) = (false, false);
    }

    /// Whether the controller may still send something for the command.
    pub(super) fn is_outstanding(&self) -> bool {
        !matches!(self.state, TransferState::Free | TransferState::Sent)
    }
}
