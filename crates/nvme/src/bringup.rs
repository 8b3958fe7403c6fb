//! Bringing a controller from any state to ready (Base 2.1 §3.5.1), or back to it.
//!
//! The machine does no I/O. It is given an [`Input`] and the time, and answers with the one
//! [`Action`] to take next. On PCIe an action is a load or a store and its input follows at once;
//! over fabrics it is a Property Get or Set and its input follows a round trip later. The machine
//! cannot tell the two apart, and one set of tests covers both.
//!
//! ```text
//!   CAP, VS, CRTO, CC --> (EN=1: wait RDY=1) --> EN=0 --> wait RDY=0 --> Disabled
//!        Disabled --> AQA, ASQ, ACQ, CC.EN=1 --> wait RDY=1 --> Ready
//! ```
//!
//! A reset is the same walk, begun while the controller was in use: [`Action::Disabled`] is the
//! moment from which it touches no memory.

mod capabilities;
#[cfg(test)]
mod tests;

use base::{Instant, Span};
use wire::register::{
    self, Configuration, ControllerStatus, ReadyTimeouts, ShutdownNotification, Version,
};

pub use capabilities::Capabilities;

/// A controller being brought up.
#[derive(Debug)]
pub struct Bringup {
    state: State,
    admin: AdminQueues,
}

/// Where the admin queues are and how deep they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminQueues {
    /// I/O virtual address of the submission ring.
    pub submission_iova: u64,
    /// I/O virtual address of the completion ring.
    pub completion_iova: u64,
    /// Entries in each, 2 to 4096.
    pub depth: u32,
}

/// What happened since the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The machine has just been made, the time it asked to wait for has come, or the caller has
    /// done what [`Action::Disabled`] allows.
    Tick,
    /// The register asked for by [`Action::Read`] holds this value.
    Value(u64),
    /// The store asked for by [`Action::Write`] has been made.
    Written,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Load a register and report [`Input::Value`].
    Read(Register),
    /// Store to a register and report [`Input::Written`].
    Write(Register, u64),
    /// Report [`Input::Tick`] once this time has come.
    WaitUntil(Instant),
    /// The controller is disabled and touches no memory until the next step. Rings may be cleared
    /// and parked buffers handed back; then report [`Input::Tick`].
    Disabled,
    /// The controller takes admin commands now.
    Ready(Capabilities),
}

/// The controller registers that the cold path touches (Base 2.1 §3.1.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// Controller capabilities, 64 bits.
    Cap,
    /// Version.
    Vs,
    /// Controller configuration.
    Cc,
    /// Controller status.
    Csts,
    /// NVM subsystem reset.
    Nssr,
    /// Admin queue attributes.
    Aqa,
    /// Admin submission queue base address, 64 bits.
    Asq,
    /// Admin completion queue base address, 64 bits.
    Acq,
    /// Controller memory buffer location.
    Cmbloc,
    /// Controller memory buffer size.
    Cmbsz,
    /// Controller memory buffer memory space control, 64 bits.
    Cmbmsc,
    /// Controller memory buffer status.
    Cmbsts,
    /// Controller ready time-outs.
    Crto,
}

/// Why a controller did not come up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringupError {
    /// Every bit read as one: the controller has been unplugged, or its BAR is no longer mapped.
    Gone {
        /// The register that read so.
        register: Register,
    },
    /// The controller reports a fatal status (CSTS.CFS).
    Fatal {
        /// CSTS when it did.
        csts: u32,
    },
    /// The controller missed its own deadline (CAP.TO, CRTO).
    Late {
        /// Which value of CSTS.RDY we were waiting for.
        want_ready: bool,
        /// How long it had promised to take at most.
        allowed: Span,
        /// CSTS when we gave up.
        csts: u32,
    },
    /// A register holds what the specification does not allow.
    Nonsense {
        /// Which field.
        field: &'static str,
        /// What it held.
        found: u64,
        /// What the specification allows.
        expected: &'static str,
    },
    /// A register holds what is allowed but not provided for here.
    Unsupported {
        /// Which field.
        field: &'static str,
        /// What it held.
        found: u64,
        /// What we could work with.
        expected: &'static str,
    },
}

/// Named after what is awaited.
#[derive(Clone, Copy, Debug)]
enum State {
    Start,
    Cap,
    Vs { cap: register::Capabilities },
    Crto { cap: register::Capabilities, vs: Version },
    Cc { capabilities: Capabilities },
    Status(Wait),
    Pause(Wait),
    DisableWritten { capabilities: Capabilities },
    MayTouchRings { capabilities: Capabilities },
    SetupWritten { next: usize, capabilities: Capabilities },
    Done,
}

/// One wait for CSTS.RDY.
#[derive(Clone, Copy, Debug)]
struct Wait {
    goal: Goal,
    since: Instant,
    allowed: Span,
    capabilities: Capabilities,
}

/// What a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// RDY=1 under somebody else's CC, so that clearing EN is defined (Base 2.1 §3.1.4.5).
    MayDisable { cc: Configuration },
    /// RDY=0.
    Disabled,
    /// RDY=1.
    Ready,
}

const SETUP_STEPS: usize = 4;

/// The looks at CSTS begin this close together and end this far apart: an emulated controller is
/// ready at once, a real one takes seconds.
const PAUSE_MIN: Span = Span::from_us(20);
const PAUSE_MAX: Span = Span::from_ms(1);

impl Bringup {
    /// A machine that has done nothing yet. Give it [`Input::Tick`] to begin.
    ///
    /// # Panics
    ///
    /// If the depth is not one that AQA can hold; it comes from our own configuration.
    pub fn new(admin: AdminQueues) -> Self {
        assert!((2..=4096).contains(&admin.depth), "AQA holds 2 to 4096 entries (§3.1.4.8)");
        Self { state: State::Start, admin }
    }

    /// Takes one step. After an error the machine has ended and must not be stepped again.
    ///
    /// # Panics
    ///
    /// If `input` does not answer the last [`Action`]. That is a mistake in the caller's loop and
    /// never something a controller can cause.
    pub fn step(&mut self, now: Instant, input: Input) -> Result<Action, BringupError> {
        let state = core::mem::replace(&mut self.state, State::Done);
        let (state, action) = match (state, input) {
            (State::Start, Input::Tick) => (State::Cap, Action::Read(Register::Cap)),
            (State::Cap, Input::Value(cap)) => on_cap(cap)?,
            (State::Vs { cap }, Input::Value(vs)) => on_version(cap, word(vs))?,
            (State::Crto { cap, vs }, Input::Value(crto)) => {
                on_ready_timeouts(cap, vs, word(crto))?
            }
            (State::Cc { capabilities }, Input::Value(cc)) => {
                on_configuration(capabilities, word(cc), now)?
            }
            (State::Status(wait), Input::Value(csts)) => self.on_status(word(csts), now, wait)?,
            (State::Pause(wait), Input::Tick) => {
                (State::Status(wait), Action::Read(Register::Csts))
            }
            (State::DisableWritten { capabilities }, Input::Written) => {
                await_status(Goal::Disabled, now, capabilities)
            }
            (State::MayTouchRings { capabilities }, Input::Tick) => self.set_up(0, capabilities),
            (State::SetupWritten { next, capabilities }, Input::Written) if next < SETUP_STEPS => {
                self.set_up(next, capabilities)
            }
            (State::SetupWritten { capabilities, .. }, Input::Written) => {
                await_status(Goal::Ready, now, capabilities)
            }
            (state, input) => panic!("{input:?} does not answer {state:?}"),
        };
        self.state = state;
        Ok(action)
    }

    fn on_status(
        &self,
        csts: u32,
        now: Instant,
        wait: Wait,
    ) -> Result<(State, Action), BringupError> {
        let Wait { goal, since, allowed, capabilities } = wait;
        present(Register::Csts, csts)?;
        let status = ControllerStatus(csts);
        let (ready, fatal) = (status.rdy(), status.cfs());
        // Only after the look: however late we were woken, the controller gets that look.
        let late = now.since(since) >= allowed;
        match goal {
            // A controller that failed or never got ready is disabled all the same.
            Goal::MayDisable { cc } if ready || fatal || late => Ok(disable(cc, capabilities)),
            Goal::Disabled if !ready => {
                Ok((State::MayTouchRings { capabilities }, Action::Disabled))
            }
            // A fatal status is cured by the reset that is under way, if by anything: it counts
            // only once the time is over.
            Goal::Disabled if late && fatal => Err(BringupError::Fatal { csts }),
            Goal::Ready if fatal => Err(BringupError::Fatal { csts }),
            Goal::Ready if ready => Ok((State::Done, Action::Ready(capabilities))),
            _ if late => {
                let want_ready = goal == Goal::Ready;
                Err(BringupError::Late { want_ready, allowed, csts })
            }
            _ => {
                let waited = now.since(since).ns;
                let pause = Span { ns: (waited / 4).clamp(PAUSE_MIN.ns, PAUSE_MAX.ns) };
                // The last look is at the deadline itself.
                let wake = now.after(pause).min(since.after(allowed));
                Ok((State::Pause(wait), Action::WaitUntil(wake)))
            }
        }
    }

    fn set_up(&self, step: usize, capabilities: Capabilities) -> (State, Action) {
        let depth_zero_based = u64::from(self.admin.depth) - 1;
        let writes: [(Register, u64); SETUP_STEPS] = [
            (Register::Aqa, (depth_zero_based << 16) | depth_zero_based),
            (Register::Asq, self.admin.submission_iova),
            (Register::Acq, self.admin.completion_iova),
            (Register::Cc, capabilities.configuration().0.into()),
        ];
        let (register, value) = writes[step];
        (State::SetupWritten { next: step + 1, capabilities }, Action::Write(register, value))
    }
}

impl Register {
    /// Where the register lies, on PCIe as in properties.
    #[expect(clippy::cast_possible_truncation, reason = "the registers end long before 4 GiB")]
    pub const fn offset(self) -> u32 {
        use register::offset;
        let offset = match self {
            Self::Cap => offset::CAP,
            Self::Vs => offset::VS,
            Self::Cc => offset::CC,
            Self::Csts => offset::CSTS,
            Self::Nssr => offset::NSSR,
            Self::Aqa => offset::AQA,
            Self::Asq => offset::ASQ,
            Self::Acq => offset::ACQ,
            Self::Cmbloc => offset::CMBLOC,
            Self::Cmbsz => offset::CMBSZ,
            Self::Cmbmsc => offset::CMBMSC,
            Self::Cmbsts => offset::CMBSTS,
            Self::Crto => offset::CRTO,
        };
        offset as u32
    }

    /// Whether the register is 64 bits wide.
    pub const fn is_wide(self) -> bool {
        matches!(self, Self::Cap | Self::Asq | Self::Acq | Self::Cmbmsc)
    }

    /// The specification's abbreviation, as it appears in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cap => "CAP",
            Self::Vs => "VS",
            Self::Cc => "CC",
            Self::Csts => "CSTS",
            Self::Nssr => "NSSR",
            Self::Aqa => "AQA",
            Self::Asq => "ASQ",
            Self::Acq => "ACQ",
            Self::Cmbloc => "CMBLOC",
            Self::Cmbsz => "CMBSZ",
            Self::Cmbmsc => "CMBMSC",
            Self::Cmbsts => "CMBSTS",
            Self::Crto => "CRTO",
        }
    }
}

fn on_cap(cap: u64) -> Result<(State, Action), BringupError> {
    if cap == u64::MAX {
        return Err(BringupError::Gone { register: Register::Cap });
    }
    Ok((State::Vs { cap: cap.into() }, Action::Read(Register::Vs)))
}

fn on_version(cap: register::Capabilities, vs: u32) -> Result<(State, Action), BringupError> {
    present(Register::Vs, vs)?;
    if cap.crwms() || cap.crims() {
        return Ok((State::Crto { cap, vs: Version(vs) }, Action::Read(Register::Crto)));
    }
    Ok(look_at_configuration(Capabilities::check(cap, Version(vs), None)?))
}

fn on_ready_timeouts(
    cap: register::Capabilities,
    vs: Version,
    crto: u32,
) -> Result<(State, Action), BringupError> {
    present(Register::Crto, crto)?;
    let capabilities = Capabilities::check(cap, vs, Some(ReadyTimeouts(crto)))?;
    Ok(look_at_configuration(capabilities))
}

fn look_at_configuration(capabilities: Capabilities) -> (State, Action) {
    (State::Cc { capabilities }, Action::Read(Register::Cc))
}

fn on_configuration(
    capabilities: Capabilities,
    cc: u32,
    now: Instant,
) -> Result<(State, Action), BringupError> {
    present(Register::Cc, cc)?;
    let cc = Configuration(cc);
    let goal = if cc.en() { Goal::MayDisable { cc } } else { Goal::Disabled };
    Ok(await_status(goal, now, capabilities))
}

fn disable(cc: Configuration, capabilities: Capabilities) -> (State, Action) {
    let cc = cc.with(|cc| cc.en(false).shn(ShutdownNotification::None));
    (State::DisableWritten { capabilities }, Action::Write(Register::Cc, cc.0.into()))
}

fn await_status(goal: Goal, now: Instant, capabilities: Capabilities) -> (State, Action) {
    let allowed = match goal {
        Goal::Ready => capabilities.ready_timeout,
        Goal::MayDisable { .. } | Goal::Disabled => capabilities.disable_timeout,
    };
    let wait = Wait { goal, since: now, allowed, capabilities };
    (State::Status(wait), Action::Read(Register::Csts))
}

/// A 32-bit register of a missing controller reads as all ones, and none of ours may hold that.
fn present(register: Register, value: u32) -> Result<(), BringupError> {
    if value == register::ALL_ONES { Err(BringupError::Gone { register }) } else { Ok(()) }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is the register")]
const fn word(value: u64) -> u32 {
    value as u32
}
