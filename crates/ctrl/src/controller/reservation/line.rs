//! Changes to the reservations of a namespace: one after the other, each in effect once it is durable.
//!
//! ```text
//!   asked ─▶ waiting ─▶ decided by what is in effect ─┬─ nothing to write ──────▶ in effect ─▶ answered
//!              ▲                                      └─▶ Keeper ─▶ Stored ─────▶ in effect ─▶ answered
//!              └───────────────────────── the next ◀───────────────────────────────┘
//! ```
//!
//! Until a change is durable nobody sees it: queues and reports go by what was there before. So
//! nothing has to be undone when it cannot be written, and of two hosts that race, the second is
//! decided by what the first has come to.

use std::collections::VecDeque;

use wire::{Command, Status};

use super::commands::{Requester, change};
use super::{Host, HostNqn, News, Reservations, Site};
use crate::controller::config::Persistence;
use crate::controller::contract::Origin;
use crate::controller::subsystem::Record;

/// The changes of one namespace that have not ended.
#[derive(Default)]
pub(in crate::controller) struct Line {
    waiting: VecDeque<Change>,
    writing: Option<Writing>,
    /// The last record could not be written, or nobody knows: the next change writes one.
    is_in_doubt: bool,
}

/// A change that is asked for.
pub(in crate::controller) struct Change {
    pub(in crate::controller) by: Asker,
    pub(in crate::controller) host: Host,
    pub(in crate::controller) nqn: Option<HostNqn>,
    pub(in crate::controller) origin: Option<Site>,
    pub(in crate::controller) wish: Wish,
}

/// What is to change.
pub(in crate::controller) enum Wish {
    /// What a reservation command says, with the keys that it brought.
    Command(Command, Vec<u8>),
    /// Whether it persists through a loss of power (feature 83h).
    Persistence(bool),
}

/// Who is told how a change ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) struct Asker {
    pub(in crate::controller) cntlid: u16,
    pub(in crate::controller) reply: Reply,
}

/// What of a controller waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Reply {
    /// A command of an I/O queue.
    Queue(Origin),
    /// A feature that it sets, by a number of its own.
    Feature(u64),
}

/// A change that is being written down.
pub(in crate::controller) struct Writing {
    /// Nobody, if whoever asked for it has been reset.
    pub(in crate::controller) by: Option<Asker>,
    pub(in crate::controller) number: u64,
    pub(in crate::controller) after: Reservations,
    pub(in crate::controller) news: News,
}

/// What a change comes to before it is in effect.
pub(in crate::controller) enum Plan {
    /// There is nothing to write.
    Now,
    /// This is to be durable first, in place of what was written; or that there is nothing.
    Write(Option<Vec<u8>>),
}

impl Line {
    pub(in crate::controller) fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    pub(in crate::controller) fn wait(&mut self, change: Change) {
        self.waiting.push_back(change);
    }

    /// The first that waits, if nothing is being written.
    pub(in crate::controller) fn next(&mut self) -> Option<Change> {
        if self.is_writing() { None } else { self.waiting.pop_front() }
    }

    pub(in crate::controller) fn begin(&mut self, writing: Writing) {
        self.writing = Some(writing);
    }

    /// What was being written under this number, once it is known what became of it.
    pub(in crate::controller) fn written(
        &mut self,
        number: u64,
        is_durable: bool,
    ) -> Option<Writing> {
        let writing = self.writing.take_if(|writing| writing.number == number)?;
        self.is_in_doubt = !is_durable;
        Some(writing)
    }

    /// Nobody is told any more: what has not begun never will, and what is being written takes effect
    /// without a word.
    pub(in crate::controller) fn forget(&mut self, is_gone: impl Fn(&Asker) -> bool) {
        self.waiting.retain(|change| !is_gone(&change.by));
        if let Some(writing) = &mut self.writing {
            writing.by.take_if(|by| is_gone(by));
        }
    }

    /// What happens to the reservations beside all changes happens to what they will be as well.
    pub(in crate::controller) fn beside(&mut self, happen: impl Fn(&mut Reservations)) {
        if let Some(writing) = &mut self.writing {
            happen(&mut writing.after);
        }
    }

    /// What the reservations will be once the change that is being written is durable.
    pub(in crate::controller) fn after(&self) -> Option<&Reservations> {
        self.writing.as_ref().map(|writing| &writing.after)
    }

    /// All who wait.
    pub(in crate::controller) fn askers(self) -> impl Iterator<Item = Asker> {
        let writing = self.writing.and_then(|writing| writing.by);
        writing.into_iter().chain(self.waiting.into_iter().map(|change| change.by))
    }
}

impl Change {
    /// Makes it, where reservations can persist or cannot.
    pub(in crate::controller) fn make(
        &self,
        reservations: &mut Reservations,
        can_persist: bool,
    ) -> Result<News, Status> {
        match &self.wish {
            Wish::Command(command, data) => {
                let (nqn, origin) = (self.nqn.as_ref(), self.origin.as_ref());
                let by = Requester { host: self.host, nqn, origin, can_persist };
                change(reservations, by, command, data)
            }
            Wish::Persistence(persists) => {
                reservations.set_persists(*persists);
                Ok(News::default())
            }
        }
    }
}

impl Record {
    /// Whether reservations can survive a loss of power.
    pub(in crate::controller) const fn can_persist(&self) -> bool {
        !matches!(self.persistence, Persistence::None)
    }

    /// What has to be written down before the reservations may become `after`.
    pub(in crate::controller) fn plan(&self, after: &Reservations) -> Result<Plan, Status> {
        let before = &self.reservations;
        match &self.persistence {
            Persistence::Simulated => Ok(Plan::Now),
            Persistence::None if after != before && after.persists => Err(Status::INVALID_FIELD),
            Persistence::None => Ok(Plan::Now),
            Persistence::Kept(_) => {
                let is_new = after != before && (after.persists || before.persists);
                if !is_new && !self.line.is_in_doubt {
                    return Ok(Plan::Now);
                }
                Ok(Plan::Write(after.persists.then(|| after.to_record())))
            }
        }
    }
}
