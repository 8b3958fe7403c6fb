//! Walking the register machines over [`Mmio`]: on PCIe each action's input follows at once.

use base::{Dma, Instant, Mmio, Span};
use wire::register::{self, ControllerStatus, ShutdownNotification};

use super::cut_off::Then;
use super::shutdown::Shutdown;
use super::{Controller, Phase, State};
use crate::bringup::{Action, AdminQueues, Bringup, BringupError, Input, Register};
use crate::error::{ControllerError, Lie, Refusal, ResetCause};
use crate::event::Event;

/// A machine on its way.
#[derive(Debug)]
pub(super) struct Walk {
    machine: Machine,
    wake_at: Instant,
}

#[derive(Debug)]
enum Machine {
    Bringup(Bringup),
    Shutdown(Shutdown),
}

/// After a subsystem reset the registers are left alone for this long: the link may go down with it
/// (Base 2.1 §3.7.1).
const SUBSYSTEM_RESET_PAUSE: Span = Span::from_ms(100);

impl Walk {
    /// Up, from any state, beginning at `when`.
    pub(super) fn bring_up(queues: AdminQueues, when: Instant) -> Self {
        Self { machine: Machine::Bringup(Bringup::new(queues)), wake_at: when }
    }

    fn shut_down(shutdown: Shutdown, now: Instant) -> Self {
        Self { machine: Machine::Shutdown(shutdown), wake_at: now }
    }

    pub(super) fn wake_at(&self) -> Instant {
        self.wake_at
    }

    pub(super) fn is_shutdown(&self) -> bool {
        matches!(self.machine, Machine::Shutdown(_))
    }

    fn step(&mut self, now: Instant, input: Input) -> Result<Action, BringupError> {
        match &mut self.machine {
            Machine::Bringup(machine) => machine.step(now, input),
            Machine::Shutdown(machine) => machine.step(now, input),
        }
    }
}

/// CAP.DSTRD, for the admin queue's doorbells. All else that CAP says is checked by [`Bringup`].
pub(super) fn doorbell_stride(mmio: &mut impl Mmio) -> Result<u8, ControllerError> {
    match mmio.read64(Register::Cap.offset()) {
        u64::MAX => Err(BringupError::Gone { register: Register::Cap }.into()),
        cap => Ok(register::Capabilities(cap).dstrd()),
    }
}

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Goes as far as the machine can go now.
    pub(super) fn walk(&mut self, now: Instant) {
        let mut input = Input::Tick;
        loop {
            let Phase::Registers(walk) = &mut self.phase else { return };
            if input == Input::Tick && now < walk.wake_at {
                return;
            }
            match walk.step(now, input) {
                Ok(Action::Read(register)) => input = Input::Value(self.read(register)),
                Ok(Action::Write(register, value)) => {
                    self.write(register, value);
                    input = Input::Written;
                }
                Ok(Action::WaitUntil(wake_at)) => {
                    walk.wake_at = wake_at;
                    return;
                }
                Ok(Action::Disabled) => {
                    let ended = match &walk.machine {
                        Machine::Bringup(_) => None,
                        Machine::Shutdown(shutdown) => Some(shutdown.has_completed()),
                    };
                    if let Some(has_completed) = ended {
                        return self.end_shutdown(now, has_completed);
                    }
                    self.handle_disabled(now);
                    input = Input::Tick;
                }
                Ok(Action::Ready(capabilities)) => {
                    if capabilities.doorbell_stride != self.doorbell_stride {
                        return self.die(now, changed_stride(capabilities.doorbell_stride).into());
                    }
                    self.capabilities = Some(capabilities);
                    match self.open_buffer(capabilities.buffer_control) {
                        Ok(()) => {}
                        Err(ControllerError::Bringup(gone)) => {
                            return self.handle_walk_error(now, gone);
                        }
                        Err(lie) => return self.die(now, lie),
                    }
                    self.status_at = now.after(self.options.status_interval);
                    return self.start_up(now);
                }
                Err(error) => return self.handle_walk_error(now, error),
            }
        }
    }

    fn handle_walk_error(&mut self, now: Instant, error: BringupError) {
        let is_shutdown = matches!(&self.phase, Phase::Registers(walk) if walk.is_shutdown());
        if let BringupError::Gone { .. } = error {
            self.remove(now);
        } else if is_shutdown {
            self.cut_off(now, Then::EndShutdown);
        } else if self.has_been_ready {
            // It may not have let go of memory, and it will not be asked again.
            self.cut_off(now, Then::Reset(ResetCause::Bringup(error)));
        } else {
            self.die(now, error.into());
        }
    }

    /// Looks at CSTS now and then. True if that changed everything.
    pub(super) fn look_at_status(&mut self, now: Instant) -> bool {
        if now < self.status_at {
            return false;
        }
        self.status_at = now.after(self.options.status_interval);
        let csts = self.mmio.read32(Register::Csts.offset());
        let status = ControllerStatus(csts);
        if csts == register::ALL_ONES {
            self.remove(now);
        } else if status.cfs() {
            self.reset_because(now, ResetCause::Fatal { csts });
        } else if !status.rdy() {
            self.reset_because(now, ResetCause::NotReady { csts });
        } else {
            return false;
        }
        true
    }

    /// Has CSTS looked at by the next [`poll`](Self::poll), for whoever knows that it has changed.
    pub fn expect_change(&mut self) {
        self.status_at = Instant::default();
    }

    /// Resets the controller. [`Event::ResetStarted`] and [`Event::Recovered`] follow.
    pub fn reset(&mut self, now: Instant) -> Result<(), Refusal> {
        self.refuse_unless_live()?;
        self.reset_because(now, ResetCause::Requested);
        Ok(())
    }

    /// Resets the whole NVM subsystem (Base 2.1 §3.7.1), and with it every other controller in it.
    pub fn reset_subsystem(&mut self, now: Instant) -> Result<(), Refusal> {
        self.refuse_unless_live()?;
        if !self.capabilities.is_some_and(|capabilities| capabilities.subsystem_reset) {
            return Err(Refusal::Unsupported { command: "NVM Subsystem Reset (CAP.NSSRS)" });
        }
        self.freeze();
        self.write(Register::Nssr, register::SUBSYSTEM_RESET.into());
        // It does what the loss of main power does.
        self.lose_writes();
        self.reset_because(now, ResetCause::Requested);
        if let Phase::Registers(walk) = &mut self.phase {
            walk.wake_at = now.after(SUBSYSTEM_RESET_PAUSE);
        }
        Ok(())
    }

    fn refuse_unless_live(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Starting | Phase::Ready if self.has_been_ready => Ok(()),
            _ => Err(Refusal::NotReady),
        }
    }

    /// Begins to walk up from where the controller is now.
    pub(super) fn begin_bring_up(&mut self, now: Instant) {
        self.phase = Phase::Registers(Walk::bring_up(self.admin_queues, now));
    }

    /// Begins to tell the controller that it is going to be switched off.
    pub(super) fn begin_shutdown(&mut self, now: Instant, notification: ShutdownNotification) {
        let allowed = self.shutdown_allowance();
        let shutdown = Shutdown::new(notification, allowed, self.admin_queues);
        self.phase = Phase::Registers(Walk::shut_down(shutdown, now));
    }

    pub(super) fn end_shutdown(&mut self, now: Instant, has_completed: bool) {
        let is_clean = has_completed || self.options.quirks.shutdown_never_completes;
        self.end_queues();
        self.answer_admin(now);
        self.phase = Phase::Ended(State::ShutDown);
        self.tell(Event::ShutDown { is_clean });
    }

    fn read(&mut self, register: Register) -> u64 {
        match register.is_wide() {
            true => self.mmio.read64(register.offset()),
            false => self.mmio.read32(register.offset()).into(),
        }
    }

    fn write(&mut self, register: Register, value: u64) {
        match u32::try_from(value) {
            Ok(value) if !register.is_wide() => self.mmio.write32(register.offset(), value),
            _ => self.mmio.write64(register.offset(), value),
        }
    }
}

fn changed_stride(found: u8) -> Lie {
    Lie { field: "CAP.DSTRD", found: found.into(), expected: "what it was before" }
}
