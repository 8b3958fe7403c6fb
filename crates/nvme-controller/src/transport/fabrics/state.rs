//! Properties and controller state machine of the fabrics transport (Base 2.1 §3.5, §6.5, §6.6).

use tenmil_base::Instant;
use tenmil_wire::Status;
use tenmil_wire::register::{
    Arbitration, Capabilities, CommandSetSelected, Configuration, ControllerStatus, ReadyTimeouts,
    ShutdownStatus, VERSION_2_1, offset,
};

use super::{DeferredResult, ENABLE_MAX, FabricsTransport, QueueCommand, REFUSED};
use crate::transport::shutdown_flush::ShutdownFlush;

/// State of a controller between its resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FabricsState {
    Disabled,
    Enabled,
    /// Disabled, with I/O queues still draining.
    Stopping,
    /// Enabled with an invalid configuration; waits to be disabled.
    Failed,
}

/// CAP.TO and CRTO, in units of 500 ms.
const READY_UNITS: u8 = 20;
impl FabricsTransport {
    /// Property Get (Base 2.1 §6.5): reads `len_bytes` at offset `at`.
    ///
    /// # Errors
    ///
    /// The property does not exist, or has another length.
    pub fn property_get(&mut self, now: Instant, at: u32, len_bytes: u32) -> Result<u64, Status> {
        self.record_activity(now);
        let entries = self.controller.configuration().queue_entries_max;
        property_value(entries, (self.configuration, self.controller_status()), at, len_bytes)
    }

    /// Property Set (Base 2.1 §6.6).
    ///
    /// # Errors
    ///
    /// The property does not exist, is read-only, or has another length.
    pub fn property_set(
        &mut self,
        now: Instant,
        at: u32,
        len_bytes: u32,
        value: u64,
    ) -> Result<(), Status> {
        self.record_activity(now);
        let value = u32::try_from(value).map_err(|_| REFUSED)?;
        if (at as usize, len_bytes) != (offset::CC, 4) {
            return Err(REFUSED);
        }
        self.configuration = Configuration(value);
        self.advance_state(now);
        Ok(())
    }

    fn controller_status(&self) -> ControllerStatus {
        let shutdown = self.shutdown.as_ref().map_or(ShutdownStatus::None, ShutdownFlush::status);
        let is_lost = self.shutdown.as_ref().is_some_and(ShutdownFlush::has_failed);
        ControllerStatus(0).with(|status| {
            status
                .rdy(matches!(self.state, FabricsState::Enabled | FabricsState::Stopping))
                .cfs(self.state == FabricsState::Failed || is_lost)
                .shst(shutdown)
        })
    }

    /// Runs the state machine as far as CC and the queues permit (Base 2.1 §3.5.2, §3.6.2, §3.7.2).
    pub(super) fn advance_state(&mut self, now: Instant) -> bool {
        let before = (self.state, self.controller_status().0);
        match (self.state, self.configuration.en()) {
            (FabricsState::Enabled | FabricsState::Failed, false) => self.handle_disable(now),
            (FabricsState::Disabled, true) => self.handle_enable(now),
            _ => {}
        }
        if self.state == FabricsState::Stopping && self.links.is_empty() {
            self.state = FabricsState::Disabled;
            if self.configuration.en() {
                self.handle_enable(now);
            }
        }
        self.poll_shutdown(now);
        (self.state, self.controller_status().0) != before
    }

    fn handle_enable(&mut self, now: Instant) {
        self.shutdown = None;
        let cc = &self.configuration;
        let known_sets =
            [CommandSetSelected::Nvm, CommandSetSelected::All, CommandSetSelected::AdminOnly];
        let is_supported = known_sets.contains(&cc.css()) && cc.ams() == Arbitration::RoundRobin;
        if is_supported {
            self.state = FabricsState::Enabled;
            self.enable_by = Instant::NEVER;
            self.controller.note_enabled(now);
            self.apply_feature_values();
        } else {
            self.last_error = Some(format!(
                "enable: CC is {:#x}, expected command set 0, 6 or 7 and round robin",
                cc.0
            ));
            self.state = FabricsState::Failed;
        }
    }

    /// Handles CC.EN = 0: a controller level reset. Outstanding admin commands are dropped, so that the
    /// host may enable the controller again.
    fn handle_disable(&mut self, now: Instant) {
        self.send_to_all_queues(&QueueCommand::Stop);
        self.controller.reset(now);
        self.event_requests.clear();
        self.completed.iter_mut().for_each(|(_, ended)| *ended = DeferredResult::Dropped);
        let waiting = self.waiting.drain(..).map(|waiting| waiting.command.cid());
        self.completed.extend(waiting.map(|cid| (cid, DeferredResult::Dropped)));
        self.enable_by = now.after(ENABLE_MAX);
        self.state = FabricsState::Stopping;
    }

    fn poll_shutdown(&mut self, now: Instant) {
        let notice = self.configuration.shn();
        ShutdownFlush::handle_shutdown(&mut self.shutdown, now, notice, &mut self.controller);
    }
}

/// Value of a property of a fabrics controller with queues of at most `entries_max` entries and these
/// values of CC and CSTS (Base 2.1 §6.5).
///
/// # Errors
///
/// The property does not exist, or has another length.
pub fn property_value(
    entries_max: u32,
    (cc, csts): (Configuration, ControllerStatus),
    at: u32,
    len_bytes: u32,
) -> Result<u64, Status> {
    let capabilities = Capabilities(0).with(|cap| {
        cap.mqes(u16::try_from(entries_max - 1).unwrap_or(u16::MAX))
            .cqr(true)
            .to(READY_UNITS)
            .css_nvm(true)
            .css_io(true)
            .mpsmax(4)
            .crwms(true)
    });
    match (at as usize, len_bytes) {
        (offset::CAP, 8) => Ok(capabilities.0),
        (offset::VS, 4) => Ok(VERSION_2_1.0.into()),
        (offset::CC, 4) => Ok(cc.0.into()),
        (offset::CSTS, 4) => Ok(csts.0.into()),
        (offset::CRTO, 4) => {
            Ok(ReadyTimeouts(0).with(|ready| ready.crwmt(READY_UNITS.into())).0.into())
        }
        _ => Err(REFUSED),
    }
}
