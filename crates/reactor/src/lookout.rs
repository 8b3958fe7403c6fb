//! A look from outside at turns that do not end: a reactor can only tell of those that did.

use base::{Instant, Span};

use crate::directory::{Directory, ReactorId};
use crate::event::Event;

/// Somebody who does not live on these reactors and looks at them now and then. It looks at the
/// reactors' own books only: a look costs the same however many threads there are.
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
        for (index, reactor) in directory.reactors().enumerate() {
            let turn = directory.turns_of(reactor);
            let found = Seen { turn, since: now, is_told: false };
            let Some(seen) = self.seen.get_mut(index) else {
                self.seen.push(found);
                continue;
            };
            if seen.turn != turn || directory.is_asleep(reactor) || directory.has_ended(reactor) {
                *seen = found;
            } else if !seen.is_told && now.since(seen.since) > ENDLESS {
                seen.is_told = true;
                directory.note(now, endless(directory, reactor, now.since(seen.since)));
            }
        }
    }
}

fn endless(directory: &Directory, reactor: ReactorId, lasts: Span) -> Event {
    Event::TurnWithoutEnd { reactor, lasts, running: directory.running_on(reactor) }
}
