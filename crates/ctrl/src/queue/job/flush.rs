//! Flush of every namespace: NSID FFFFFFFFh (Base 2.1 §7.2).

use wire::Status;

use super::{Event, Step};

/// A flush of everything under way.
#[derive(Debug, Default)]
pub(crate) struct FlushAll {
    /// The first failure; the others are flushed all the same.
    failure: Option<Status>,
}

impl FlushAll {
    pub(super) fn next(&mut self, event: Event) -> Step {
        match event {
            Event::Begin => Step::FlushFrom(0),
            Event::Flushed(Some((channel, outcome))) => {
                if !outcome.is_success() {
                    self.failure.get_or_insert(Status(outcome.0));
                }
                Step::FlushFrom(channel.saturating_add(1))
            }
            Event::Flushed(None) => Step::refused(self.failure.unwrap_or(Status::SUCCESS)),
            _ => Step::confused(),
        }
    }
}
