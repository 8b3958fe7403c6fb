//! Controller state machine of the memory transport: enable, stop, shutdown and failure, driven by CC and
//! reported in CSTS (Base 2.1 §3.1.4.5, §3.1.4.6, §3.5, §3.6, §3.7).
//!
//! ```text
//!   Disabled ── EN = 1, AQA and CC valid ──▶ Enabled, RDY = 1
//!      ▲  └──── EN = 1, invalid ───────────▶ Failed, CFS = 1 ◀─ ring fault, keep-alive timeout ─ Enabled
//!      │                                           │ EN = 0                              EN = 0 │
//!      └──────────── no more access to host memory, RDY = 0 ────────────── Stopping ◀──────────┘
//! ```

use tenmil_base::{Error, Instant, Interrupts, RingMemory};
use tenmil_wire::register::{
    Arbitration, CommandSetSelected, Configuration, ControllerStatus, ShutdownNotification,
    ShutdownStatus,
};

use super::MemoryTransport;
use super::admin_queue::AdminQueue;
use super::shutdown_flush::ShutdownFlush;

/// State of a controller between its resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControllerState {
    /// CC.EN is 0 and so is CSTS.RDY.
    Disabled,
    /// Commands are executed.
    Enabled,
    /// Disabled, with operations still in progress.
    Stopping,
    /// Failed; waits to be disabled (CSTS.CFS).
    Failed,
}

/// CAP.MPSMIN + 12: pages of 4 KiB.
pub(super) const PAGE_SHIFT_MIN: u8 = 12;
/// CAP.MPSMAX + 12: pages of 64 KiB.
pub(super) const PAGE_SHIFT_MAX: u8 = 16;

impl<H: RingMemory + Clone, I: Interrupts> MemoryTransport<H, I> {
    /// Handles a host store to a register.
    #[cold]
    pub(super) fn handle_register_store(&mut self, now: Instant) {
        self.vectors.raise_unmasked(&self.bar);
        if self.bar.take_subsystem_reset_request() {
            self.disable_controller(now);
            self.shutdown = None;
        }
        self.advance_state(now);
    }

    /// Runs the state machine as far as possible. Returns whether the state has changed.
    #[inline(always)]
    pub(super) fn advance_state(&mut self, now: Instant) -> bool {
        let cc = Configuration(self.bar.cc());
        let before = (self.state, self.bar.csts());
        match (self.state, cc.en()) {
            (ControllerState::Enabled | ControllerState::Failed, false) => {
                self.disable_controller(now)
            }
            (ControllerState::Disabled, true) => self.enable_controller(cc),
            _ => {}
        }
        if self.state == ControllerState::Stopping && self.poll_drained() {
            self.queues.clear();
            self.admin = None;
            self.queue_change_count = self.queue_change_count.wrapping_add(1);
            self.state = ControllerState::Disabled;
            self.publish_status();
            if Configuration(self.bar.cc()).en() {
                self.enable_controller(Configuration(self.bar.cc()));
            }
        }
        self.poll_shutdown(now, cc.shn());
        (self.state, self.bar.csts()) != before
    }

    /// Whether a transition is in progress that only [`run_housekeeping`](Self::run_housekeeping)
    /// completes.
    pub(super) fn is_transitioning(&self) -> bool {
        let is_flushing = self.shutdown.as_ref().is_some_and(ShutdownFlush::is_running);
        self.state == ControllerState::Stopping || is_flushing || !self.deletions.is_empty()
    }

    /// Handles a revocation of host memory: fails the controller, and acknowledges the revocation once no
    /// access is in flight anymore. Returns true while the acknowledgment is still due.
    pub(super) fn check_revocation(&mut self, now: Instant) -> bool {
        if !self.host.is_revoked() {
            return false;
        }
        self.fail_controller(now, "the host has revoked access to its memory");
        let is_drained = self.poll_drained();
        if is_drained {
            self.host.ack_revocation();
        }
        !is_drained
    }

    /// Fails the controller: sets CSTS.CFS and stops fetching commands.
    pub(super) fn fail_controller(&mut self, now: Instant, why: &str) {
        self.last_error = Some(why.to_owned());
        if self.state == ControllerState::Enabled {
            self.state = ControllerState::Failed;
            self.stop_queues(now);
            self.publish_status();
        }
    }

    pub(super) fn publish_status(&self) {
        let is_ready = match self.state {
            ControllerState::Disabled => false,
            ControllerState::Enabled | ControllerState::Stopping | ControllerState::Failed => true,
        };
        let shutdown = self.shutdown.as_ref().map_or(ShutdownStatus::None, ShutdownFlush::status);
        let is_lost = self.shutdown.as_ref().is_some_and(ShutdownFlush::has_failed);
        let status = ControllerStatus(0).with(|status| {
            status
                .rdy(is_ready)
                .cfs(self.state == ControllerState::Failed || is_lost)
                .shst(shutdown)
        });
        self.bar.publish_status(status.0);
    }

    /// Handles CC.EN = 1.
    fn enable_controller(&mut self, cc: Configuration) {
        // The shutdown status of the previous enable is cleared (Base 2.1 §3.7.2).
        self.shutdown = None;
        match self.open_admin_queue(cc) {
            Ok(admin) => {
                self.admin = Some(admin);
                self.state = ControllerState::Enabled;
                self.apply_feature_values();
            }
            Err(why) => {
                self.last_error = Some(why.to_string());
                self.state = ControllerState::Failed;
            }
        }
        self.publish_status();
    }

    /// Opens the admin queue. The error is one line with the value found and the value expected.
    fn open_admin_queue(&mut self, cc: Configuration) -> Result<AdminQueue<H>, Error> {
        let page_shift = PAGE_SHIFT_MIN + cc.mps();
        if page_shift > PAGE_SHIFT_MAX {
            return Err(Error::environment(format!(
                "enable: CC.MPS is {}, expected at most 4",
                cc.mps()
            )));
        }
        let known_sets =
            [CommandSetSelected::Nvm, CommandSetSelected::All, CommandSetSelected::AdminOnly];
        if !known_sets.contains(&cc.css()) {
            return Err(Error::environment(format!(
                "enable: CC.CSS is {}, expected 0, 6 or 7",
                (cc.0 >> 4) & 7
            )));
        }
        if cc.ams() != Arbitration::RoundRobin {
            return Err(Error::environment(format!(
                "enable: CC.AMS is {}, expected 0 (round robin)",
                (cc.0 >> 11) & 7
            )));
        }
        let (aqa, asq, acq) = self.bar.admin_queues();
        // Both are 0's based; a ring of one entry cannot hold a command.
        let (submissions, completions) = ((aqa & 0xfff) + 1, (aqa >> 16 & 0xfff) + 1);
        if submissions < 2 || completions < 2 {
            return Err(Error::environment(format!(
                "enable: AQA is {aqa:#x}, expected queues of two entries or more"
            )));
        }
        self.bar.doorbells().clear_tail(0);
        self.bar.doorbells().clear_head(0);
        let transfer_bytes_max = self.controller.configuration().transfer_bytes_max;
        let opened = AdminQueue::open(
            self.host.clone(),
            (submissions, asq),
            (completions, acq),
            page_shift,
            transfer_bytes_max,
        );
        opened
            .map_err(|fault| format!("enable: the host has no memory at {:#x}", fault.iova))
            .map_err(Error::environment)
    }

    /// Handles CC.EN = 0: a controller level reset (Base 2.1 §3.7.2).
    fn disable_controller(&mut self, now: Instant) {
        if self.state == ControllerState::Disabled {
            return;
        }
        self.stop_queues(now);
        self.controller.reset(now);
        self.vectors.reset(&self.bar);
        self.shadow = None;
        self.deletions.clear();
        self.state = ControllerState::Stopping;
        self.publish_status();
    }

    /// Stops fetching and completing commands.
    fn stop_queues(&mut self, now: Instant) {
        for signalled in &mut self.queues {
            signalled.queue.stop(now);
            signalled.queue.fence_writes();
        }
        if let Some(admin) = &mut self.admin {
            admin.stop();
        }
    }

    /// Processes completed host accesses and returns whether everything has drained.
    fn poll_drained(&mut self) -> bool {
        let doorbells = self.bar.doorbells().clone();
        let admin = self.admin.as_mut().is_none_or(|admin| {
            let _ = admin.next_request(&doorbells);
            admin.is_drained()
        });
        admin && self.queues.iter().all(|signalled| signalled.queue.is_drained())
    }

    /// CC.SHN (Base 2.1 §3.6.1).
    fn poll_shutdown(&mut self, now: Instant, notice: ShutdownNotification) {
        ShutdownFlush::handle_shutdown(&mut self.shutdown, now, notice, &mut self.controller);
        self.publish_status();
    }
}
