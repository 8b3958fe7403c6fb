//! Controller shutdown notification (Base 2.1 §3.6.1), followed by disabling the controller.
//!
//! ```text
//!   CC.SHN --> wait CSTS.SHST=complete (bounded) --> EN=0 --> wait RDY=0 --> Disabled
//! ```
//!
//! Like [`Bringup`], it performs no I/O and uses the same actions. It ends with
//! [`BringupAction::Disabled`]: only a disabled controller has certainly stopped its DMA.

use tenmil_base::{Instant, Span};
use tenmil_wire::register::{self, Configuration, ControllerStatus};
use tenmil_wire::register::{ShutdownNotification, ShutdownStatus};

use crate::bringup::{
    AdminQueueAddresses, Bringup, BringupAction, BringupError, BringupInput, Register,
};

/// Shutdown in progress.
#[derive(Debug)]
pub struct Shutdown {
    state: ShutdownState,
    kind: ShutdownNotification,
    allowed: Span,
    admin: Option<AdminQueueAddresses>,
    completed: bool,
}

/// States, named for the awaited input.
#[derive(Debug)]
enum ShutdownState {
    Start,
    Cc,
    Notified,
    Status { since: Instant },
    Pause { since: Instant },
    Disabled(Bringup),
    Done,
}

const PAUSE_MAX: Span = Span::from_ms(10);

impl Shutdown {
    /// Creates the state machine. [`BringupInput::Tick`] starts it. After `allowed`, the controller is
    /// disabled even if the shutdown is not complete.
    pub fn new(
        kind: ShutdownNotification,
        allowed: Span,
        admin: Option<AdminQueueAddresses>,
    ) -> Self {
        Self { state: ShutdownState::Start, kind, allowed, admin, completed: false }
    }

    /// Whether the controller has reported the shutdown as complete.
    pub fn has_completed(&self) -> bool {
        self.completed
    }

    /// Performs one step. After [`BringupAction::Disabled`] or an error, the machine has ended.
    ///
    /// # Panics
    ///
    /// `input` does not match the last [`BringupAction`]; a controller cannot cause it.
    pub fn step(
        &mut self,
        now: Instant,
        input: BringupInput,
    ) -> Result<BringupAction, BringupError> {
        let state = core::mem::replace(&mut self.state, ShutdownState::Done);
        let (state, action) = match (state, input) {
            (ShutdownState::Start, BringupInput::Tick) => {
                (ShutdownState::Cc, BringupAction::Read(Register::Cc))
            }
            (ShutdownState::Cc, BringupInput::Value(cc)) => {
                let cc = Configuration(check_present_dword(Register::Cc, cc)?)
                    .with(|cc| cc.shn(self.kind));
                (ShutdownState::Notified, BringupAction::Write(Register::Cc, cc.0.into()))
            }
            (ShutdownState::Notified, BringupInput::Written) => {
                (ShutdownState::Status { since: now }, BringupAction::Read(Register::Csts))
            }
            (ShutdownState::Status { since }, BringupInput::Value(csts)) => self.on_status(
                ControllerStatus(check_present_dword(Register::Csts, csts)?),
                since,
                now,
            )?,
            (ShutdownState::Pause { since }, BringupInput::Tick) => {
                (ShutdownState::Status { since }, BringupAction::Read(Register::Csts))
            }
            (ShutdownState::Disabled(mut sequencer), input) => {
                let action = sequencer.step(now, input)?;
                (ShutdownState::Disabled(sequencer), action)
            }
            (state, input) => panic!("{input:?} does not answer {state:?}"),
        };
        self.state = state;
        Ok(action)
    }

    fn on_status(
        &mut self,
        csts: ControllerStatus,
        since: Instant,
        now: Instant,
    ) -> Result<(ShutdownState, BringupAction), BringupError> {
        let waited = now.since(since);
        self.completed = csts.shst() == ShutdownStatus::Complete;
        if self.completed || csts.cfs() || waited >= self.allowed {
            let mut sequencer = Bringup::new(self.admin);
            let action = sequencer.step(now, BringupInput::Tick)?;
            return Ok((ShutdownState::Disabled(sequencer), action));
        }
        let pause = Span { ns: (waited.ns / 4).clamp(20_000, PAUSE_MAX.ns) };
        let wake = now.after(pause).min(since.after(self.allowed));
        Ok((ShutdownState::Pause { since }, BringupAction::WaitUntil(wake)))
    }
}

fn check_present_dword(register: Register, value: u64) -> Result<u32, BringupError> {
    match u32::try_from(value) {
        Ok(register::ALL_ONES) | Err(_) => Err(BringupError::Removed { register }),
        Ok(value) => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};
    use tenmil_wire::register::ShutdownNotification;

    use super::Shutdown;
    use crate::bringup::{
        AdminQueueAddresses, BringupAction, BringupError, BringupInput, Register,
    };

    const ADMIN: AdminQueueAddresses =
        AdminQueueAddresses { submission_iova: 0x1000, completion_iova: 0x2000, depth: 2 };
    const ALLOWED: Span = Span::from_ms(100);

    fn register_value(register: Register, cc: u64, complete: bool) -> u64 {
        match register {
            Register::Cap => 0x20_0100_00ff,
            Register::Vs => 0x0001_0400,
            Register::Cc => cc,
            _ => (cc & 1) | u64::from(complete) << 3,
        }
    }

    /// Runs a shutdown against a controller that completes after `lag`, or disappears at read `gone_at`:
    /// its result, whether it was clean, its duration, and the values of CC.
    fn run_shutdown(lag: Span, gone_at: u32) -> (Result<(), BringupError>, bool, Span, Vec<u64>) {
        let mut sequencer = Shutdown::new(ShutdownNotification::Normal, ALLOWED, Some(ADMIN));
        let (mut now, mut input) = (Instant::default(), BringupInput::Tick);
        let (mut cc, mut log, mut reads) = (0x0046_0001_u64, Vec::new(), 0);
        loop {
            match sequencer.step(now, input) {
                Ok(BringupAction::Read(register)) => {
                    reads += 1;
                    input = BringupInput::Value(match register {
                        _ if reads < gone_at => {
                            register_value(register, cc, now.since(Instant::default()) >= lag)
                        }
                        _ if register.is_wide() => u64::MAX,
                        _ => u64::from(u32::MAX),
                    });
                }
                Ok(BringupAction::Write(Register::Cc, value)) => {
                    log.push(value);
                    (cc, input) = (value, BringupInput::Written);
                }
                Ok(BringupAction::WaitUntil(wake)) => {
                    assert!(wake > now, "a wait must end in the future");
                    (now, input) = (wake, BringupInput::Tick);
                }
                Ok(BringupAction::Disabled) => {
                    let took = now.since(Instant::default());
                    return (Ok(()), sequencer.has_completed(), took, log);
                }
                Ok(other) => panic!("{other:?}"),
                Err(error) => return (Err(error), false, now.since(Instant::default()), log),
            }
        }
    }

    #[test]
    fn shutdown_notifies_waits_and_disables() {
        let (outcome, clean, took, log) = run_shutdown(Span::from_ms(30), u32::MAX);
        assert_eq!((outcome, clean), (Ok(()), true));
        assert!((Span::from_ms(30)..Span::from_ms(41)).contains(&took), "{took}");
        assert_eq!(log, [0x0046_4001, 0x0046_0000]);
    }

    #[test]
    fn shutdown_completed_within_the_timeout_is_clean() {
        for lag_ms in 95..=105 {
            let (outcome, clean, took, _) = run_shutdown(Span::from_ms(lag_ms), u32::MAX);
            assert_eq!((outcome, clean), (Ok(()), lag_ms <= 100), "lag {lag_ms} ms");
            assert!(took <= ALLOWED, "{took}");
        }
    }

    #[test]
    fn removal_at_any_read_ends_the_shutdown_at_once() {
        for gone_at in 1.. {
            let (outcome, ..) = run_shutdown(Span::from_ms(1), gone_at);
            if outcome.is_ok() {
                assert!(gone_at > 6);
                break;
            }
            assert!(matches!(outcome, Err(BringupError::Removed { .. })), "{outcome:?}");
        }
    }
}
