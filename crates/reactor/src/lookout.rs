//! A look from outside at turns that do not end: a reactor can only tell of those that did.

use base::{Instant, Span};

use crate::directory::{Directory, ReactorId, ReactorSample};
use crate::event::Event;

/// Somebody who does not live on these reactors and looks at them now and then.
#[derive(Debug, Default)]
pub struct Lookout {
    /// By reactor.
    seen: Vec<Seen>,
}

/// The turn in which a reactor was found last.
#[derive(Clone, Copy, Debug)]
struct Seen {
    turn: u64,
    since: Instant,
    is_told: bool,
}

/// How long a turn may last before it is told that it may have no end.
pub const ENDLESS: Span = Span::from_secs(1);

impl Lookout {
    /// Looks. A reactor that is awake and was in the same turn at every look for longer than
    /// [`ENDLESS`] is told of, once for each turn.
    pub fn look(&mut self, now: Instant, directory: &Directory) {
        let sample = directory.sample(now);
        for (index, reactor) in sample.reactors.iter().enumerate() {
            let found = Seen { turn: reactor.turns, since: now, is_told: false };
            let Some(seen) = self.seen.get_mut(index) else {
                self.seen.push(found);
                continue;
            };
            if seen.turn != reactor.turns || reactor.asleep || directory.has_ended(reactor.id) {
                *seen = found;
            } else if !seen.is_told && now.since(seen.since) > ENDLESS {
                seen.is_told = true;
                directory.note(now, endless(reactor, now.since(seen.since)));
            }
        }
    }
}

fn endless(reactor: &ReactorSample, lasts: Span) -> Event {
    let ReactorSample { id, running, .. } = reactor;
    Event::TurnWithoutEnd { reactor: ReactorId(id.0), lasts, running: running.clone() }
}
