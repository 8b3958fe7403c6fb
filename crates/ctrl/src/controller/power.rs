//! Power states: which one the controller is in, and when it goes to rest by itself
//! (Base 2.1 §8.1.17).
//!
//! The states are those of the machine it runs on, so none consumes a known power and entering or
//! leaving one takes no time; what they change is what the host is told.

use base::{Instant, Span};
use wire::Status;

/// The power state of one controller.
#[derive(Clone, Debug)]
pub(super) struct Power {
    state: u8,
    /// The state it returns to when there is work.
    operational: u8,
    /// Whether it changes states by itself (feature 0Ch).
    pub(super) is_autonomous: bool,
    /// For each state: where to go after how long.
    transitions: [Transition; STATES.len()],
    idle_since: Instant,
}

/// What happens after some time without work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Transition {
    /// How long; zero means never.
    after: Span,
    to: u8,
}

/// A state that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// Whether I/O commands are processed in it.
    pub(super) is_operational: bool,
}

/// The states there are (NPSS is one less).
pub(super) const STATES: [State; 3] = [
    State { is_operational: true },
    State { is_operational: true },
    State { is_operational: false },
];

/// Bytes of the table of feature 0Ch (Base 2.1 §5.1.25.1.6).
pub(super) const TABLE_BYTES: usize = 256;

impl Power {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            state: 0,
            operational: 0,
            is_autonomous: false,
            transitions: [Transition::default(); STATES.len()],
            idle_since: now,
        }
    }

    /// The state it is in.
    pub(super) const fn state(&self) -> u8 {
        self.state
    }

    /// Goes to a state because the host says so.
    pub(super) fn set(&mut self, now: Instant, state: u8) -> Result<(), Status> {
        let found = STATES.get(usize::from(state)).ok_or(Status::INVALID_FIELD)?;
        self.enter(now, state, found.is_operational);
        Ok(())
    }

    /// There is work: a state that is not operational is left.
    pub(super) fn worked(&mut self, now: Instant) {
        self.idle_since = now;
        if self.state != self.operational {
            self.state = self.operational;
        }
    }

    /// Goes to rest if it is time to.
    pub(super) fn turn(&mut self, now: Instant) {
        if self.wake_at() != Instant::NEVER && now >= self.wake_at() {
            let to = self.transitions[usize::from(self.state)].to;
            let is_operational = STATES[usize::from(to)].is_operational;
            self.enter(now, to, is_operational);
        }
    }

    /// When it is time to.
    pub(super) fn wake_at(&self) -> Instant {
        let transition = self.transitions[usize::from(self.state)];
        if self.is_autonomous && transition.after.ns > 0 && transition.to != self.state {
            self.idle_since.after(transition.after)
        } else {
            Instant::NEVER
        }
    }

    /// Takes the table of transitions (Base 2.1 §5.1.25.1.6, Figure 396). One to a state that is
    /// not there, or that is operational, is refused.
    pub(super) fn set_table(&mut self, table: &[u8]) -> Result<(), Status> {
        let mut transitions = [Transition::default(); STATES.len()];
        for (transition, entry) in transitions.iter_mut().zip(table.as_chunks::<8>().0) {
            let word = u64::from_le_bytes(*entry);
            let after = Span::from_ms(word >> 8 & 0x00ff_ffff);
            let to = u8::try_from(word >> 3 & 0x1f).map_err(|_| Status::INVALID_FIELD)?;
            let target = STATES.get(usize::from(to)).ok_or(Status::INVALID_FIELD)?;
            if after.ns > 0 && target.is_operational {
                return Err(Status::INVALID_FIELD);
            }
            *transition = Transition { after, to };
        }
        self.transitions = transitions;
        Ok(())
    }

    /// The table of transitions.
    pub(super) fn table(&self) -> [u8; TABLE_BYTES] {
        let mut table = [0; TABLE_BYTES];
        for (transition, entry) in self.transitions.iter().zip(table.as_chunks_mut::<8>().0) {
            let word = u64::from(transition.to) << 3 | (transition.after.ns / 1_000_000) << 8;
            *entry = word.to_le_bytes();
        }
        table
    }

    fn enter(&mut self, now: Instant, state: u8, is_operational: bool) {
        self.state = state;
        self.idle_since = now;
        if is_operational {
            self.operational = state;
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};
    use wire::Status;

    use super::{Power, TABLE_BYTES};

    const AT_0: Instant = Instant { ns: 0 };

    fn table(entries: &[(u64, u64)]) -> [u8; TABLE_BYTES] {
        let mut table = [0; TABLE_BYTES];
        for (&(to, after_ms), entry) in entries.iter().zip(table.as_chunks_mut::<8>().0) {
            *entry = (to << 3 | after_ms << 8).to_le_bytes();
        }
        table
    }

    #[test]
    fn it_rests_when_idle_and_returns_to_where_it_worked() {
        let mut power = Power::new(AT_0);
        power.set_table(&table(&[(0, 0), (2, 50)])).unwrap();
        power.is_autonomous = true;
        power.set(AT_0, 1).unwrap();
        let at = |ms| AT_0.after(Span::from_ms(ms));
        power.turn(at(49));
        assert_eq!(power.state(), 1);
        power.worked(at(49));
        assert_eq!(power.wake_at(), at(99));
        power.turn(at(99));
        assert_eq!((power.state(), power.wake_at()), (2, Instant::NEVER));
        power.worked(at(200));
        assert_eq!(power.state(), 1);
    }

    #[test]
    fn without_being_told_to_it_never_rests() {
        let mut power = Power::new(AT_0);
        power.set_table(&table(&[(2, 50)])).unwrap();
        power.turn(Instant::NEVER);
        assert_eq!((power.state(), power.wake_at()), (0, Instant::NEVER));
    }

    #[test]
    fn a_state_that_is_not_there_is_refused() {
        let mut power = Power::new(AT_0);
        for state in 0..=31 {
            assert_eq!(power.set(AT_0, state).is_ok(), state < 3);
        }
    }

    #[test]
    fn a_table_comes_back_as_it_was_set_and_a_bad_one_changes_nothing() {
        let mut power = Power::new(AT_0);
        let good = table(&[(2, 1), (2, 0x00ff_ffff), (0, 0)]);
        power.set_table(&good).unwrap();
        assert_eq!(power.table(), good);
        for bad in [table(&[(3, 1)]), table(&[(1, 1)]), table(&[(31, 0)])] {
            assert_eq!(power.set_table(&bad), Err(Status::INVALID_FIELD));
            assert_eq!(power.table(), good);
        }
    }
}
