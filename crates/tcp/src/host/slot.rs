//! A command that is outstanding at a host.

use wire::Completion;

/// A place in the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Where on the outgoing stream the last byte ends that was queued for it.
    pub(super) sent_end: u64,
    /// How it ended, when it was answered before all of it was sent.
    pub(super) completion: Completion,
    /// All of its data.
    pub(super) len_bytes: u32,
    /// Of these, bytes that have come, or that were queued to be sent.
    pub(super) moved: u32,
    /// How far the controller has asked for them.
    pub(super) asked: u32,
    /// Ranges that were asked for and are not queued, the oldest at `ask_first`.
    pub(super) asks: u8,
    pub(super) ask_first: u8,
    pub(super) state: State,
    /// It is in the list of those with ranges to be sent. Stays true when the tag is used again.
    pub(super) is_pending: bool,
    /// LAST_PDU has come.
    pub(super) is_last: bool,
    /// Data have come damaged.
    pub(super) is_damaged: bool,
}

/// What is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// A command.
    Free,
    /// An answer, and nothing before it.
    Answer,
    /// Data, then an answer.
    Data,
    /// R2Ts, then an answer.
    Ask,
    /// Nothing from the controller: the rest of it is to be sent.
    Sent,
}

/// A range that the controller has asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ask {
    /// Where it ends.
    pub(super) end: u32,
    /// What its data are to carry.
    pub(super) ttag: u16,
}

impl Slot {
    pub(super) const FREE: Self = Self {
        sent_end: 0,
        completion: Completion([0; 4]),
        len_bytes: 0,
        moved: 0,
        asked: 0,
        asks: 0,
        ask_first: 0,
        state: State::Free,
        is_pending: false,
        is_last: false,
        is_damaged: false,
    };

    /// Whether the controller may still say something about it.
    pub(super) fn is_outstanding(&self) -> bool {
        !matches!(self.state, State::Free | State::Sent)
    }
}
