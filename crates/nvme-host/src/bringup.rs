//! Controller initialization from any state to ready (Base 2.1 §3.5.1), also used for resets.
//!
//! The state machine performs no I/O. It receives a [`BringupInput`] and the time, and returns the one
//! [`BringupAction`] to perform next. On PCIe, an action is a load or a store, and its input follows at
//! once; over fabrics, it is a Property Get or Set, and its input follows a round trip later. The machine
//! cannot distinguish the two, so one set of tests covers both.
//!
//! ```text
//!   CAP, VS, CRTO, CC --> (EN=1: wait RDY=1) --> EN=0 --> wait RDY=0 --> Disabled
//!        Disabled --> AQA, ASQ, ACQ, CC.EN=1 --> wait RDY=1 --> Ready
//!
//! Without admin rings, as over fabrics, AQA, ASQ and ACQ are not written.
//! ```
//!
//! A reset is the same sequence, started while the controller was in use: from
//! [`BringupAction::Disabled`] on, the controller does not access memory.

mod capabilities;
#[cfg(test)]
mod tests;

use tenmil_base::{Instant, Span};
use tenmil_wire::register::{
    self, Configuration, ControllerStatus, ReadyTimeouts, ShutdownNotification, Version,
};

pub use capabilities::Capabilities;

/// Controller initialization in progress.
#[derive(Debug)]
pub struct Bringup {
    state: BringupState,
    admin: Option<AdminQueueAddresses>,
}

/// Addresses and depth of the admin queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdminQueueAddresses {
    /// I/O virtual address of the submission ring.
    pub submission_iova: u64,
    /// I/O virtual address of the completion ring.
    pub completion_iova: u64,
    /// Entries in each, 2 to 4096.
    pub depth: u32,
}

/// Result of the last action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringupInput {
    /// Start of the sequence, end of a requested wait, or completion of the work permitted by
    /// [`BringupAction::Disabled`].
    Tick,
    /// Value of the register requested by [`BringupAction::Read`].
    Value(u64),
    /// The store requested by [`BringupAction::Write`] is done.
    Written,
}

/// Next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringupAction {
    /// Load a register and report [`BringupInput::Value`].
    Read(Register),
    /// Store to a register and report [`BringupInput::Written`].
    Write(Register, u64),
    /// Report [`BringupInput::Tick`] at this time.
    WaitUntil(Instant),
    /// The controller is disabled and does not access memory until the next step. Rings may be cleared
    /// and parked buffers returned; then report [`BringupInput::Tick`].
    Disabled,
    /// The controller accepts admin commands.
    Ready(Capabilities),
}

/// Controller registers used off the I/O path (Base 2.1 §3.1.4).
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
    /// Controller ready timeouts.
    Crto,
}

/// Reason why the initialization failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringupError {
    /// Every bit reads as one: the controller was removed, or its BAR is no longer mapped.
    Removed {
        /// Register that was read.
        register: Register,
    },
    /// The controller reports a fatal status (CSTS.CFS).
    Fatal {
        /// Value of CSTS.
        csts: u32,
    },
    /// The controller exceeded its own timeout (CAP.TO, CRTO).
    Timeout {
        /// Awaited value of CSTS.RDY.
        want_ready: bool,
        /// Timeout reported by the controller.
        allowed: Span,
        /// Value of CSTS at the timeout.
        csts: u32,
    },
    /// A register has a value that the specification does not allow.
    InvalidRegister {
        /// Name of the field.
        field: &'static str,
        /// Value found.
        found: u64,
        /// Values that the specification allows.
        expected: &'static str,
    },
    /// A register has a valid value that this driver does not support.
    Unsupported {
        /// Name of the field.
        field: &'static str,
        /// Value found.
        found: u64,
        /// Supported values.
        expected: &'static str,
    },
}

/// States, named for the awaited input.
#[derive(Clone, Copy, Debug)]
enum BringupState {
    Start,
    Cap,
    Vs { cap: register::Capabilities },
    Crto { cap: register::Capabilities, vs: Version },
    Cc { capabilities: Capabilities },
    Status(ReadyWait),
    Pause(ReadyWait),
    DisableWritten { capabilities: Capabilities },
    MayTouchRings { capabilities: Capabilities },
    SetupWritten { next: usize, capabilities: Capabilities },
    Done,
}

/// Wait for CSTS.RDY.
#[derive(Clone, Copy, Debug)]
struct ReadyWait {
    goal: ReadyGoal,
    since: Instant,
    allowed: Span,
    capabilities: Capabilities,
}

/// Purpose of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadyGoal {
    /// RDY=1 under the CC of a previous user, so that clearing EN is defined (Base 2.1 §3.1.4.5).
    MayDisable { cc: Configuration },
    /// RDY=0.
    Disabled,
    /// RDY=1.
    Ready,
}

const SETUP_STEPS: usize = 4;

/// Bounds of the CSTS poll interval, which grows: an emulated controller is ready at once, a real one
/// takes seconds.
const PAUSE_MIN: Span = Span::from_us(20);
const PAUSE_MAX: Span = Span::from_ms(1);

impl Bringup {
    /// Creates the state machine. [`BringupInput::Tick`] starts it.
    ///
    /// # Panics
    ///
    /// The depth is not valid for AQA; it comes from the driver's own configuration.
    pub fn new(admin: Option<AdminQueueAddresses>) -> Self {
        let is_valid = admin.is_none_or(|admin| (2..=4096).contains(&admin.depth));
        assert!(is_valid, "AQA holds 2 to 4096 entries (§3.1.4.8)");
        Self { state: BringupState::Start, admin }
    }

    /// Performs one step. After an error, the machine has ended and must not be stepped again.
    ///
    /// # Panics
    ///
    /// `input` does not match the last [`BringupAction`]. This is a bug in the caller; a controller
    /// cannot cause it.
    pub fn step(
        &mut self,
        now: Instant,
        input: BringupInput,
    ) -> Result<BringupAction, BringupError> {
        let state = core::mem::replace(&mut self.state, BringupState::Done);
        let (state, action) = match (state, input) {
            (BringupState::Start, BringupInput::Tick) => {
                (BringupState::Cap, BringupAction::Read(Register::Cap))
            }
            (BringupState::Cap, BringupInput::Value(cap)) => on_cap(cap)?,
            (BringupState::Vs { cap }, BringupInput::Value(vs)) => on_version(cap, low_dword(vs))?,
            (BringupState::Crto { cap, vs }, BringupInput::Value(crto)) => {
                on_ready_timeouts(cap, vs, low_dword(crto))?
            }
            (BringupState::Cc { capabilities }, BringupInput::Value(cc)) => {
                on_configuration(capabilities, low_dword(cc), now)?
            }
            (BringupState::Status(wait), BringupInput::Value(csts)) => {
                self.on_status(low_dword(csts), now, wait)?
            }
            (BringupState::Pause(wait), BringupInput::Tick) => {
                (BringupState::Status(wait), BringupAction::Read(Register::Csts))
            }
            (BringupState::DisableWritten { capabilities }, BringupInput::Written) => {
                await_status_step(ReadyGoal::Disabled, now, capabilities)
            }
            (BringupState::MayTouchRings { capabilities }, BringupInput::Tick) => {
                let first = if self.admin.is_some() { 0 } else { SETUP_STEPS - 1 };
                self.admin_setup_step(first, capabilities)
            }
            (BringupState::SetupWritten { next, capabilities }, BringupInput::Written)
                if next < SETUP_STEPS =>
            {
                self.admin_setup_step(next, capabilities)
            }
            (BringupState::SetupWritten { capabilities, .. }, BringupInput::Written) => {
                await_status_step(ReadyGoal::Ready, now, capabilities)
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
        wait: ReadyWait,
    ) -> Result<(BringupState, BringupAction), BringupError> {
        let ReadyWait { goal, since, allowed, capabilities } = wait;
        check_present(Register::Csts, csts)?;
        let status = ControllerStatus(csts);
        let (ready, fatal) = (status.rdy(), status.cfs());
        // Checked after the read: even after a late wake-up, the status is evaluated first.
        let late = now.since(since) >= allowed;
        match goal {
            // A controller that failed or never became ready is disabled nevertheless.
            ReadyGoal::MayDisable { cc } if ready || fatal || late => {
                Ok(disable_step(cc, capabilities))
            }
            ReadyGoal::Disabled if !ready => {
                Ok((BringupState::MayTouchRings { capabilities }, BringupAction::Disabled))
            }
            // The reset in progress may clear a fatal status, so it is an error only after the timeout.
            ReadyGoal::Disabled if late && fatal => Err(BringupError::Fatal { csts }),
            ReadyGoal::Ready if fatal => Err(BringupError::Fatal { csts }),
            ReadyGoal::Ready if ready => {
                Ok((BringupState::Done, BringupAction::Ready(capabilities)))
            }
            _ if late => {
                let want_ready = goal == ReadyGoal::Ready;
                Err(BringupError::Timeout { want_ready, allowed, csts })
            }
            _ => {
                let waited = now.since(since).ns;
                let pause = Span { ns: (waited / 4).clamp(PAUSE_MIN.ns, PAUSE_MAX.ns) };
                // The last read happens at the deadline itself.
                let wake = now.after(pause).min(since.after(allowed));
                Ok((BringupState::Pause(wait), BringupAction::WaitUntil(wake)))
            }
        }
    }

    fn admin_setup_step(
        &self,
        step: usize,
        capabilities: Capabilities,
    ) -> (BringupState, BringupAction) {
        let admin = self
            .admin
            .unwrap_or(AdminQueueAddresses { depth: 1, ..AdminQueueAddresses::default() });
        let depth_zero_based = u64::from(admin.depth) - 1;
        let writes: [(Register, u64); SETUP_STEPS] = [
            (Register::Aqa, (depth_zero_based << 16) | depth_zero_based),
            (Register::Asq, admin.submission_iova),
            (Register::Acq, admin.completion_iova),
            (Register::Cc, capabilities.enable_configuration().0.into()),
        ];
        let (register, value) = writes[step];
        (
            BringupState::SetupWritten { next: step + 1, capabilities },
            BringupAction::Write(register, value),
        )
    }
}

impl Register {
    /// Register offset, the same on PCIe and for properties.
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

    /// Abbreviation in the specification, used in messages.
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

fn on_cap(cap: u64) -> Result<(BringupState, BringupAction), BringupError> {
    if cap == u64::MAX {
        return Err(BringupError::Removed { register: Register::Cap });
    }
    Ok((BringupState::Vs { cap: cap.into() }, BringupAction::Read(Register::Vs)))
}

fn on_version(
    cap: register::Capabilities,
    vs: u32,
) -> Result<(BringupState, BringupAction), BringupError> {
    check_present(Register::Vs, vs)?;
    if cap.crwms() || cap.crims() {
        return Ok((
            BringupState::Crto { cap, vs: Version(vs) },
            BringupAction::Read(Register::Crto),
        ));
    }
    Ok(read_configuration_step(Capabilities::from_registers(cap, Version(vs), None)?))
}

fn on_ready_timeouts(
    cap: register::Capabilities,
    vs: Version,
    crto: u32,
) -> Result<(BringupState, BringupAction), BringupError> {
    check_present(Register::Crto, crto)?;
    let capabilities = Capabilities::from_registers(cap, vs, Some(ReadyTimeouts(crto)))?;
    Ok(read_configuration_step(capabilities))
}

fn read_configuration_step(capabilities: Capabilities) -> (BringupState, BringupAction) {
    (BringupState::Cc { capabilities }, BringupAction::Read(Register::Cc))
}

fn on_configuration(
    capabilities: Capabilities,
    cc: u32,
    now: Instant,
) -> Result<(BringupState, BringupAction), BringupError> {
    check_present(Register::Cc, cc)?;
    let cc = Configuration(cc);
    let goal = if cc.en() { ReadyGoal::MayDisable { cc } } else { ReadyGoal::Disabled };
    Ok(await_status_step(goal, now, capabilities))
}

fn disable_step(cc: Configuration, capabilities: Capabilities) -> (BringupState, BringupAction) {
    let cc = cc.with(|cc| cc.en(false).shn(ShutdownNotification::None));
    (BringupState::DisableWritten { capabilities }, BringupAction::Write(Register::Cc, cc.0.into()))
}

fn await_status_step(
    goal: ReadyGoal,
    now: Instant,
    capabilities: Capabilities,
) -> (BringupState, BringupAction) {
    let allowed = match goal {
        ReadyGoal::Ready => capabilities.ready_timeout,
        ReadyGoal::MayDisable { .. } | ReadyGoal::Disabled => capabilities.disable_timeout,
    };
    let wait = ReadyWait { goal, since: now, allowed, capabilities };
    (BringupState::Status(wait), BringupAction::Read(Register::Csts))
}

/// Checks that a 32-bit register does not read as all ones, the value of a missing controller. No valid
/// register has that value.
fn check_present(register: Register, value: u32) -> Result<(), BringupError> {
    if value == register::ALL_ONES { Err(BringupError::Removed { register }) } else { Ok(()) }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is the register")]
const fn low_dword(value: u64) -> u32 {
    value as u32
}
