//! Power states and autonomous power state transitions (Base 2.1 §8.1.17).
//!
//! The states do not change the power consumption of the machine: no state has a known power, and
//! entering or leaving one takes no time. They change only what is reported to the host.

use tenmil_base::{Instant, Span};
use tenmil_wire::Status;

/// Power state of one controller.
#[derive(Clone, Debug)]
pub(super) struct PowerManagement {
    state: u8,
    /// Operational state to which it returns for I/O.
    operational: u8,
    /// Whether autonomous transitions are enabled (feature 0Ch).
    pub(super) is_autonomous: bool,
    /// Transition of each state.
    transitions: [IdleTransition; STATES.len()],
    idle_since: Instant,
}

/// Autonomous transition after an idle time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct IdleTransition {
    /// Idle time; zero means never.
    after: Span,
    to: u8,
}

/// Properties of a power state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PowerStateInfo {
    /// Whether I/O commands are processed in it.
    pub(super) is_operational: bool,
}

/// Supported power states (NPSS is one less).
pub(super) const STATES: [PowerStateInfo; 3] = [
    PowerStateInfo { is_operational: true },
    PowerStateInfo { is_operational: true },
    PowerStateInfo { is_operational: false },
];

/// Bytes of the table of feature 0Ch (Base 2.1 §5.1.25.1.6).
pub(super) const TABLE_BYTES: usize = 256;

impl PowerManagement {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            state: 0,
            operational: 0,
            is_autonomous: false,
            transitions: [IdleTransition::default(); STATES.len()],
            idle_since: now,
        }
    }

    /// Current state.
    pub(super) const fn state(&self) -> u8 {
        self.state
    }

    /// Enters a state requested by the host.
    pub(super) fn set_state(&mut self, now: Instant, state: u8) -> Result<(), Status> {
        let found = STATES.get(usize::from(state)).ok_or(Status::INVALID_FIELD)?;
        self.enter_state(now, state, found.is_operational);
        Ok(())
    }

    /// Records I/O activity: leaves a non-operational state.
    pub(super) fn note_activity(&mut self, now: Instant) {
        self.idle_since = now;
        if self.state != self.operational {
            self.state = self.operational;
        }
    }

    /// Performs an autonomous transition that is due.
    pub(super) fn poll(&mut self, now: Instant) {
        if self.wake_at() != Instant::NEVER && now >= self.wake_at() {
            let to = self.transitions[usize::from(self.state)].to;
            let is_operational = STATES[usize::from(to)].is_operational;
            self.enter_state(now, to, is_operational);
        }
    }

    /// Time of the next autonomous transition.
    pub(super) fn wake_at(&self) -> Instant {
        let transition = self.transitions[usize::from(self.state)];
        if self.is_autonomous && transition.after.ns > 0 && transition.to != self.state {
            self.idle_since.after(transition.after)
        } else {
            Instant::NEVER
        }
    }

    /// Sets the transition table (Base 2.1 §5.1.25.1.6, Figure 396). A transition to a state that does
    /// not exist, or that is operational, is rejected.
    pub(super) fn set_transition_table(&mut self, table: &[u8]) -> Result<(), Status> {
        let mut transitions = [IdleTransition::default(); STATES.len()];
        for (transition, entry) in transitions.iter_mut().zip(table.as_chunks::<8>().0) {
            let word = u64::from_le_bytes(*entry);
            let after = Span::from_ms(word >> 8 & 0x00ff_ffff);
            let to = u8::try_from(word >> 3 & 0x1f).map_err(|_| Status::INVALID_FIELD)?;
            let target = STATES.get(usize::from(to)).ok_or(Status::INVALID_FIELD)?;
            if after.ns > 0 && target.is_operational {
                return Err(Status::INVALID_FIELD);
            }
            *transition = IdleTransition { after, to };
        }
        self.transitions = transitions;
        Ok(())
    }

    /// Transition table.
    pub(super) fn transition_table(&self) -> [u8; TABLE_BYTES] {
        let mut table = [0; TABLE_BYTES];
        for (transition, entry) in self.transitions.iter().zip(table.as_chunks_mut::<8>().0) {
            let word = u64::from(transition.to) << 3 | (transition.after.ns / 1_000_000) << 8;
            *entry = word.to_le_bytes();
        }
        table
    }

    fn enter_state(&mut self, now: Instant, state: u8, is_operational: bool) {
        self.state = state;
        self.idle_since = now;
        if is_operational {
            self.operational = state;
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};
    use tenmil_wire::Status;

    use super::{PowerManagement, TABLE_BYTES};

    const AT_0: Instant = Instant { ns: 0 };

    fn transition_table(entries: &[(u64, u64)]) -> [u8; TABLE_BYTES] {
        let mut table = [0; TABLE_BYTES];
        for (&(to, after_ms), entry) in entries.iter().zip(table.as_chunks_mut::<8>().0) {
            *entry = (to << 3 | after_ms << 8).to_le_bytes();
        }
        table
    }

    #[test]
    fn idle_controller_enters_a_non_operational_state_and_returns_on_activity() {
        let mut power = PowerManagement::new(AT_0);
        power.set_transition_table(&transition_table(&[(0, 0), (2, 50)])).unwrap();
        power.is_autonomous = true;
        power.set_state(AT_0, 1).unwrap();
        let at = |ms| AT_0.after(Span::from_ms(ms));
        power.poll(at(49));
        assert_eq!(power.state(), 1);
        power.note_activity(at(49));
        assert_eq!(power.wake_at(), at(99));
        power.poll(at(99));
        assert_eq!((power.state(), power.wake_at()), (2, Instant::NEVER));
        power.note_activity(at(200));
        assert_eq!(power.state(), 1);
    }

    #[test]
    fn autonomous_transitions_are_disabled_by_default() {
        let mut power = PowerManagement::new(AT_0);
        power.set_transition_table(&transition_table(&[(2, 50)])).unwrap();
        power.poll(Instant::NEVER);
        assert_eq!((power.state(), power.wake_at()), (0, Instant::NEVER));
    }

    #[test]
    fn invalid_power_state_is_rejected() {
        let mut power = PowerManagement::new(AT_0);
        for state in 0..=31 {
            assert_eq!(power.set_state(AT_0, state).is_ok(), state < 3);
        }
    }

    #[test]
    fn transition_table_round_trips_and_an_invalid_one_is_rejected() {
        let mut power = PowerManagement::new(AT_0);
        let good = transition_table(&[(2, 1), (2, 0x00ff_ffff), (0, 0)]);
        power.set_transition_table(&good).unwrap();
        assert_eq!(power.transition_table(), good);
        for bad in
            [transition_table(&[(3, 1)]), transition_table(&[(1, 1)]), transition_table(&[(31, 0)])]
        {
            assert_eq!(power.set_transition_table(&bad), Err(Status::INVALID_FIELD));
            assert_eq!(power.transition_table(), good);
        }
    }
}
