//! Enabling, stopping, shutting down, failing: what CC asks for and CSTS answers
//! (Base 2.1 §3.1.4.5, §3.1.4.6, §3.5, §3.6, §3.7).
//!
//! ```text
//!   Disabled ── EN = 1, AQA and CC in order ──▶ Enabled, RDY = 1
//!      ▲  └──── EN = 1, anything wrong ───────▶ Failed, CFS = 1 ◀── ring gone, host silent ── Enabled
//!      │                                           │ EN = 0                              EN = 0 │
//!      └──────────── nothing can touch the host any more, RDY = 0 ──────── Stopping ◀──────────┘
//! ```

use base::{HostMemory, Instant, Interrupts};
use wire::register::{
    Arbitration, CommandSetSelected, Configuration, ControllerStatus, ShutdownNotification,
    ShutdownStatus,
};

use super::MemoryFrontEnd;
use super::admin::AdminQueue;
use super::shutdown::Shutdown;

/// Where a controller is between its resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// CC.EN is 0 and so is CSTS.RDY.
    Disabled,
    /// It works.
    Enabled,
    /// It has been disabled and not everything that was begun has ended.
    Stopping,
    /// It has failed and waits to be disabled (CSTS.CFS).
    Failed,
}

/// CAP.MPSMIN + 12: pages of 4 KiB.
pub(super) const PAGE_SHIFT_MIN: u8 = 12;
/// CAP.MPSMAX + 12: pages of 64 KiB.
pub(super) const PAGE_SHIFT_MAX: u8 = 16;

impl<H: HostMemory + Clone, I: Interrupts> MemoryFrontEnd<H, I> {
    /// The host has stored to a register.
    #[cold]
    pub(super) fn registers_changed(&mut self, now: Instant) {
        self.vectors.unmasked(&self.bar);
        if self.bar.take_subsystem_reset() {
            self.stop(now);
            self.shutdown = None;
        }
        self.turn_life(now);
    }

    /// Goes from one state of life to the next as far as possible. True if it went anywhere.
    pub(super) fn turn_life(&mut self, now: Instant) -> bool {
        let cc = Configuration(self.bar.cc());
        let before = (self.life, self.bar.csts());
        match (self.life, cc.en()) {
            (Life::Enabled | Life::Failed, false) => self.stop(now),
            (Life::Disabled, true) => self.start(cc),
            _ => {}
        }
        if self.life == Life::Stopping && self.is_drained() {
            self.queues.clear();
            self.admin = None;
            self.queue_changes = self.queue_changes.wrapping_add(1);
            self.life = Life::Disabled;
            self.publish();
            if Configuration(self.bar.cc()).en() {
                self.start(Configuration(self.bar.cc()));
            }
        }
        self.turn_shutdown(now, cc.shn());
        (self.life, self.bar.csts()) != before
    }

    /// Whether something goes on that only [`tend`](Self::tend) brings to its end.
    pub(super) fn is_in_motion(&self) -> bool {
        let is_flushing = self.shutdown.as_ref().is_some_and(Shutdown::is_running);
        self.life == Life::Stopping || is_flushing || !self.deletions.is_empty()
    }

    /// A host that has cut the controller off is told once nothing can touch its memory any more.
    /// True if it is still to be told.
    pub(super) fn heed_cut(&mut self, now: Instant) -> bool {
        if !self.host.is_cut_off() {
            return false;
        }
        self.fail(now, "the host has cut the controller off from its memory");
        let is_drained = self.is_drained();
        if is_drained {
            self.host.let_go();
        }
        !is_drained
    }

    /// The controller cannot go on: CSTS.CFS, and nothing more is taken.
    pub(super) fn fail(&mut self, now: Instant, why: &str) {
        self.trouble = Some(why.to_owned());
        if self.life == Life::Enabled {
            self.life = Life::Failed;
            self.halt(now);
            self.publish();
        }
    }

    pub(super) fn publish(&self) {
        let is_ready = match self.life {
            Life::Disabled => false,
            Life::Enabled | Life::Stopping | Life::Failed => true,
        };
        let shutdown = self.shutdown.as_ref().map_or(ShutdownStatus::None, Shutdown::status);
        let is_lost = self.shutdown.as_ref().is_some_and(Shutdown::has_failed);
        let status = ControllerStatus(0).with(|status| {
            status.rdy(is_ready).cfs(self.life == Life::Failed || is_lost).shst(shutdown)
        });
        self.bar.publish_status(status.0);
    }

    /// CC.EN went to 1.
    fn start(&mut self, cc: Configuration) {
        // What was reported about the last life is over (Base 2.1 §3.7.2).
        self.shutdown = None;
        match self.open(cc) {
            Ok(admin) => {
                self.admin = Some(admin);
                self.life = Life::Enabled;
                self.configure();
            }
            Err(why) => {
                self.trouble = Some(why);
                self.life = Life::Failed;
            }
        }
        self.publish();
    }

    /// Opens the admin queue. The error says, in a line, what was found and what was expected.
    fn open(&mut self, cc: Configuration) -> Result<AdminQueue<H>, String> {
        let page_shift = PAGE_SHIFT_MIN + cc.mps();
        if page_shift > PAGE_SHIFT_MAX {
            return Err(format!("enable: CC.MPS is {}, expected at most 4", cc.mps()));
        }
        let known_sets =
            [CommandSetSelected::Nvm, CommandSetSelected::All, CommandSetSelected::AdminOnly];
        if !known_sets.contains(&cc.css()) {
            return Err(format!("enable: CC.CSS is {}, expected 0, 6 or 7", (cc.0 >> 4) & 7));
        }
        if cc.ams() != Arbitration::RoundRobin {
            return Err(format!(
                "enable: CC.AMS is {}, expected 0 (round robin)",
                (cc.0 >> 11) & 7
            ));
        }
        let (aqa, asq, acq) = self.bar.admin_queues();
        // Both are 0's based; a queue of one entry holds nothing.
        let (submissions, completions) = ((aqa & 0xfff) + 1, (aqa >> 16 & 0xfff) + 1);
        if submissions < 2 || completions < 2 {
            return Err(format!("enable: AQA is {aqa:#x}, expected queues of two entries or more"));
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
        opened.map_err(|fault| format!("enable: the host has no memory at {:#x}", fault.iova))
    }

    /// CC.EN went to 0: a controller level reset (Base 2.1 §3.7.2).
    fn stop(&mut self, now: Instant) {
        if self.life == Life::Disabled {
            return;
        }
        self.halt(now);
        self.controller.reset(now);
        self.vectors.reset(&self.bar);
        self.shadow = None;
        self.deletions.clear();
        self.life = Life::Stopping;
        self.publish();
    }

    /// Nothing is taken any more, and nothing answered.
    fn halt(&mut self, now: Instant) {
        for served in &mut self.queues {
            served.queue.stop(now);
            served.queue.fence_writes();
        }
        if let Some(admin) = &mut self.admin {
            admin.stop();
        }
    }

    /// Lets the host's last answers in and asks whether that was all.
    fn is_drained(&mut self) -> bool {
        let doorbells = self.bar.doorbells().clone();
        let admin = self.admin.as_mut().is_none_or(|admin| {
            let _ = admin.next_wanted(&doorbells);
            admin.is_drained()
        });
        admin && self.queues.iter().all(|served| served.queue.is_drained())
    }

    /// CC.SHN (Base 2.1 §3.6.1).
    fn turn_shutdown(&mut self, now: Instant, notice: ShutdownNotification) {
        Shutdown::heed(&mut self.shutdown, now, notice, &mut self.controller);
        self.publish();
    }
}
