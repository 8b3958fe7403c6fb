//! Register sequences over [`Mmio`]: runs `Bringup` and `Shutdown`, whose inputs follow at once on PCIe.

use tenmil_base::{Dma, Instant, Mmio, Span};
use tenmil_wire::register::{self, ControllerStatus, ShutdownNotification};

use super::dma_revocation::AfterRevocation;
use super::shutdown::Shutdown;
use super::{Controller, ControllerState, Phase, QueueTransports};
use crate::bringup::{
    AdminQueueAddresses, Bringup, BringupAction, BringupError, BringupInput, Register,
};
use crate::error::{ControllerError, InvalidValue, RequestError, ResetCause};
use crate::event::Event;

/// Register sequence in progress.
#[derive(Debug)]
pub(super) struct RegisterSequence {
    sequencer: RegisterSequenceKind,
    wake_at: Instant,
}

#[derive(Debug)]
enum RegisterSequenceKind {
    Bringup(Bringup),
    Shutdown(Shutdown),
}

/// Time after a subsystem reset during which registers are not accessed: the link may go down, too (Base
/// 2.1 §3.7.1).
const SUBSYSTEM_RESET_PAUSE: Span = Span::from_ms(100);

impl RegisterSequence {
    /// Initialization from any state, starting at `when`.
    pub(super) fn bring_up(queues: Option<AdminQueueAddresses>, when: Instant) -> Self {
        Self { sequencer: RegisterSequenceKind::Bringup(Bringup::new(queues)), wake_at: when }
    }

    fn shut_down(shutdown: Shutdown, now: Instant) -> Self {
        Self { sequencer: RegisterSequenceKind::Shutdown(shutdown), wake_at: now }
    }

    pub(super) fn wake_at(&self) -> Instant {
        self.wake_at
    }

    pub(super) fn is_shutdown(&self) -> bool {
        matches!(self.sequencer, RegisterSequenceKind::Shutdown(_))
    }

    fn step(&mut self, now: Instant, input: BringupInput) -> Result<BringupAction, BringupError> {
        match &mut self.sequencer {
            RegisterSequenceKind::Bringup(sequencer) => sequencer.step(now, input),
            RegisterSequenceKind::Shutdown(sequencer) => sequencer.step(now, input),
        }
    }
}

/// CAP.DSTRD, for the admin queue's doorbells. [`Bringup`] checks the rest of CAP.
pub(super) fn read_doorbell_stride(mmio: &mut impl Mmio) -> Result<u8, ControllerError> {
    match mmio.read64(Register::Cap.offset()) {
        u64::MAX => Err(BringupError::Removed { register: Register::Cap }.into()),
        cap => Ok(register::Capabilities(cap).dstrd()),
    }
}

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Runs the sequence as far as possible.
    pub(super) fn run_sequence(&mut self, now: Instant) {
        let mut input = BringupInput::Tick;
        loop {
            let Phase::Registers(sequence) = &mut self.phase else { return };
            if input == BringupInput::Tick && now < sequence.wake_at {
                return;
            }
            match sequence.step(now, input) {
                Ok(BringupAction::Read(register)) => {
                    input = BringupInput::Value(self.read_register(register))
                }
                Ok(BringupAction::Write(register, value)) => {
                    self.write_register(register, value);
                    input = BringupInput::Written;
                }
                Ok(BringupAction::WaitUntil(wake_at)) => {
                    sequence.wake_at = wake_at;
                    return;
                }
                Ok(BringupAction::Disabled) => {
                    let ended = match &sequence.sequencer {
                        RegisterSequenceKind::Bringup(_) => None,
                        RegisterSequenceKind::Shutdown(shutdown) => Some(shutdown.has_completed()),
                    };
                    if let Some(has_completed) = ended {
                        return self.end_shutdown(now, has_completed);
                    }
                    self.handle_disabled(now);
                    input = BringupInput::Tick;
                }
                Ok(BringupAction::Ready(capabilities)) => {
                    // The doorbells are already mapped with the old stride.
                    if capabilities.doorbell_stride != self.doorbell_stride {
                        return self.fail_permanently(
                            now,
                            changed_stride_error(capabilities.doorbell_stride).into(),
                        );
                    }
                    self.capabilities = Some(capabilities);
                    match self.configure_cmb(capabilities.buffer_control) {
                        Ok(()) => {}
                        Err(ControllerError::Bringup(gone)) => {
                            return self.handle_sequence_error(now, gone);
                        }
                        Err(lie) => return self.fail_permanently(now, lie),
                    }
                    self.status_at = now.after(self.options.status_interval);
                    return self.begin_startup(now);
                }
                Err(error) => return self.handle_sequence_error(now, error),
            }
        }
    }

    fn handle_sequence_error(&mut self, now: Instant, error: BringupError) {
        let is_shutdown =
            matches!(&self.phase, Phase::Registers(sequence) if sequence.is_shutdown());
        if let BringupError::Removed { .. } = error {
            self.handle_removal(now);
        } else if is_shutdown {
            self.revoke_dma(now, AfterRevocation::EndShutdown);
        } else if self.has_been_ready {
            // The controller may still access memory, and will not report otherwise.
            self.revoke_dma(now, AfterRevocation::Reset(ResetCause::Bringup(error)));
        } else {
            self.fail_permanently(now, error.into());
        }
    }

    /// Reads CSTS periodically. Returns whether that changed the phase.
    pub(super) fn poll_csts(&mut self, now: Instant) -> bool {
        if now < self.status_at {
            return false;
        }
        self.status_at = now.after(self.options.status_interval);
        let csts = self.mmio.read32(Register::Csts.offset());
        let status = ControllerStatus(csts);
        if csts == register::ALL_ONES {
            self.handle_removal(now);
        } else if status.cfs() {
            self.reset_with_cause(now, ResetCause::Fatal { csts });
        } else if !status.rdy() {
            self.reset_with_cause(now, ResetCause::NotReady { csts });
        } else {
            return false;
        }
        true
    }

    /// Makes the next [`poll`](Self::poll) read CSTS, for a caller that knows of a change.
    pub fn request_csts_poll(&mut self) {
        self.status_at = Instant::default();
    }

    /// Resets the controller. [`Event::ResetStarted`] and [`Event::Recovered`] follow.
    pub fn reset(&mut self, now: Instant) -> Result<(), RequestError> {
        self.refuse_unless_live()?;
        self.reset_with_cause(now, ResetCause::Requested);
        Ok(())
    }

    /// Resets the NVM subsystem (Base 2.1 §3.7.1), including all its other controllers.
    pub fn reset_subsystem(&mut self, now: Instant) -> Result<(), RequestError> {
        self.refuse_unless_live()?;
        if !self.capabilities.is_some_and(|capabilities| capabilities.subsystem_reset) {
            return Err(RequestError::Unsupported { command: "NVM Subsystem Reset (CAP.NSSRS)" });
        }
        self.freeze();
        self.write_register(Register::Nssr, register::SUBSYSTEM_RESET.into());
        // A subsystem reset has the effect of losing main power.
        self.record_lost_writes();
        self.reset_with_cause(now, ResetCause::Requested);
        if let Phase::Registers(sequence) = &mut self.phase {
            sequence.wake_at = now.after(SUBSYSTEM_RESET_PAUSE);
        }
        Ok(())
    }

    fn refuse_unless_live(&self) -> Result<(), RequestError> {
        match self.phase {
            Phase::Starting | Phase::Ready if self.has_been_ready => Ok(()),
            _ => Err(RequestError::NotReady),
        }
    }

    /// Starts the initialization from the current state.
    pub(super) fn begin_bring_up(&mut self, now: Instant) {
        self.phase = Phase::Registers(RegisterSequence::bring_up(self.admin_queues, now));
    }

    /// Starts the shutdown of the controller.
    pub(super) fn begin_shutdown(&mut self, now: Instant, notification: ShutdownNotification) {
        let allowed = self.shutdown_timeout();
        let shutdown = Shutdown::new(notification, allowed, self.admin_queues);
        self.phase = Phase::Registers(RegisterSequence::shut_down(shutdown, now));
    }

    pub(super) fn end_shutdown(&mut self, now: Instant, has_completed: bool) {
        let is_clean = has_completed || self.options.quirks.shutdown_never_completes;
        self.end_queues();
        self.fail_admin_commands(now);
        self.phase = Phase::Ended(ControllerState::ShutDown);
        self.push_event(Event::ShutDown { is_clean });
    }

    fn read_register(&mut self, register: Register) -> u64 {
        match register.is_wide() {
            true => self.mmio.read64(register.offset()),
            false => self.mmio.read32(register.offset()).into(),
        }
    }

    fn write_register(&mut self, register: Register, value: u64) {
        match u32::try_from(value) {
            Ok(value) if !register.is_wide() => self.mmio.write32(register.offset(), value),
            _ => self.mmio.write64(register.offset(), value),
        }
    }
}

fn changed_stride_error(found: u8) -> InvalidValue {
    InvalidValue { field: "CAP.DSTRD", found: found.into(), expected: "what it was before" }
}
