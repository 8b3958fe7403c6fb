//! A command that is under way at a controller.

use wire::Completion;

/// R2Ts that may be outstanding for a command.
pub(super) const ASKS: u8 = 4;

/// A place in the table. Of the fields that count bytes, those of one direction are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// How it ends, once `is_answered`.
    pub(super) completion: Completion,
    /// All of its data.
    pub(super) len_bytes: u32,
    /// Of these, bytes that the owner has room for, or has ready to be sent.
    pub(super) ready: u32,
    /// Bytes that were asked for, or queued to be sent.
    pub(super) asked: u32,
    /// Bytes that have come.
    pub(super) came: u32,
    /// Where the oldest range that was asked for begins.
    pub(super) ask_begin: u32,
    /// Where ranges end that were asked for, the oldest at `ask_first`.
    pub(super) ask_ends: [u32; ASKS as usize],
    pub(super) asks: u8,
    pub(super) ask_first: u8,
    pub(super) cid: u16,
    pub(super) state: State,
    /// It is in the list of those with something to send. Stays true when the tag is used again.
    pub(super) is_queued: bool,
    /// Its owner is done with it.
    pub(super) is_answered: bool,
    /// Its answer is queued.
    pub(super) is_sent: bool,
    /// Data have come damaged.
    pub(super) is_damaged: bool,
}

/// Which way its data go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// There is no command.
    Free,
    /// It has no data, or they came in its capsule.
    Bare,
    /// They are coming in its capsule.
    InCapsule,
    /// They are asked for.
    FromHost,
    /// They are sent.
    ToHost,
}

impl Slot {
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
        state: State::Free,
        is_queued: false,
        is_answered: false,
        is_sent: false,
        is_damaged: false,
    };

    /// Whether its owner still has to finish it.
    pub(super) fn is_under_way(&self) -> bool {
        self.state != State::Free && !self.is_answered
    }

    /// Whether data are on their way that the host has been asked for, or sends unasked.
    pub(super) fn is_receiving(&self) -> bool {
        self.state == State::InCapsule || self.asks > 0
    }

    /// Whether all that its host sends has come, and nothing is sent to it.
    pub(super) fn is_still(&self) -> bool {
        match self.state {
            State::Free | State::Bare => true,
            State::InCapsule => false,
            State::FromHost => self.came == self.len_bytes,
            State::ToHost => self.ready == 0,
        }
    }

    /// The oldest range that was asked for.
    pub(super) fn ask(&self) -> (u32, u32) {
        (self.ask_begin, self.ask_ends[usize::from(self.ask_first)])
    }

    /// A range is asked for.
    pub(super) fn push_ask(&mut self, end: u32) {
        let place = (self.ask_first + self.asks) % ASKS;
        self.ask_ends[usize::from(place)] = end;
        self.asks += 1;
        self.asked = end;
    }

    /// All of the oldest range has come.
    pub(super) fn pop_ask(&mut self) {
        self.ask_begin = self.ask_ends[usize::from(self.ask_first)];
        self.ask_first = (self.ask_first + 1) % ASKS;
        self.asks -= 1;
    }
}
