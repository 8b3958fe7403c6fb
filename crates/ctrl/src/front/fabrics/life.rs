//! The properties of a controller behind connections, and the life that they tell of (Base 2.1 §3.5,
//! §6.5, §6.6).

use base::Instant;
use wire::Status;
use wire::register::{
    Arbitration, Capabilities, CommandSetSelected, Configuration, ControllerStatus, ReadyTimeouts,
    ShutdownStatus, VERSION_2_1, offset,
};

use super::{ENABLE_MAX, Ended, FabricsFrontEnd, Order, REFUSED};
use crate::front::shutdown::Shutdown;

/// Where a controller is between its resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Disabled,
    Enabled,
    /// It has been disabled, and I/O queues still end.
    Stopping,
    /// It was enabled with what cannot be, and waits to be disabled.
    Failed,
}

/// CAP.TO and CRTO, in units of 500 ms.
const READY_UNITS: u8 = 20;
impl FabricsFrontEnd {
    /// Property Get (Base 2.1 §6.5): the value of `len_bytes` at `at`.
    ///
    /// # Errors
    ///
    /// If there is no such property, or it has another length.
    pub fn property(&mut self, now: Instant, at: u32, len_bytes: u32) -> Result<u64, Status> {
        self.hear(now);
        let entries = self.controller.configuration().queue_entries_max;
        property(entries, (self.configuration, self.status()), at, len_bytes)
    }

    /// Property Set (Base 2.1 §6.6).
    ///
    /// # Errors
    ///
    /// If there is no such property, or it cannot be set, or it has another length.
    pub fn set_property(
        &mut self,
        now: Instant,
        at: u32,
        len_bytes: u32,
        value: u64,
    ) -> Result<(), Status> {
        self.hear(now);
        let value = u32::try_from(value).map_err(|_| REFUSED)?;
        if (at as usize, len_bytes) != (offset::CC, 4) {
            return Err(REFUSED);
        }
        self.configuration = Configuration(value);
        self.turn_life(now);
        Ok(())
    }

    fn status(&self) -> ControllerStatus {
        let shutdown = self.shutdown.as_ref().map_or(ShutdownStatus::None, Shutdown::status);
        let is_lost = self.shutdown.as_ref().is_some_and(Shutdown::has_failed);
        ControllerStatus(0).with(|status| {
            status
                .rdy(matches!(self.life, Life::Enabled | Life::Stopping))
                .cfs(self.life == Life::Failed || is_lost)
                .shst(shutdown)
        })
    }

    /// Goes from one state of life to the next as far as CC and the queues let it
    /// (Base 2.1 §3.5.2, §3.6.2, §3.7.2).
    pub(super) fn turn_life(&mut self, now: Instant) -> bool {
        let before = (self.life, self.status().0);
        match (self.life, self.configuration.en()) {
            (Life::Enabled | Life::Failed, false) => self.stop(now),
            (Life::Disabled, true) => self.start(now),
            _ => {}
        }
        if self.life == Life::Stopping && self.links.is_empty() {
            self.life = Life::Disabled;
            if self.configuration.en() {
                self.start(now);
            }
        }
        self.turn_shutdown(now);
        (self.life, self.status().0) != before
    }

    fn start(&mut self, now: Instant) {
        self.shutdown = None;
        let cc = &self.configuration;
        let known_sets =
            [CommandSetSelected::Nvm, CommandSetSelected::All, CommandSetSelected::AdminOnly];
        let is_sound = known_sets.contains(&cc.css()) && cc.ams() == Arbitration::RoundRobin;
        if is_sound {
            self.life = Life::Enabled;
            self.enable_by = Instant::NEVER;
            self.controller.enabled(now);
            self.configure();
        } else {
            self.trouble = Some(format!(
                "enable: CC is {:#x}, expected command set 0, 6 or 7 and round robin",
                cc.0
            ));
            self.life = Life::Failed;
        }
    }

    /// CC.EN went to 0: a controller level reset. What the admin queue still owes is forgotten, so
    /// that its host may enable the controller once more.
    fn stop(&mut self, now: Instant) {
        self.order(&Order::Stop);
        self.controller.reset(now);
        self.parked.clear();
        self.ends.iter_mut().for_each(|(_, ended)| *ended = Ended::Forgotten);
        let waiting = self.waiting.drain(..).map(|waiting| waiting.command.cid());
        self.ends.extend(waiting.map(|cid| (cid, Ended::Forgotten)));
        self.enable_by = now.after(ENABLE_MAX);
        self.life = Life::Stopping;
    }

    fn turn_shutdown(&mut self, now: Instant) {
        let notice = self.configuration.shn();
        Shutdown::heed(&mut self.shutdown, now, notice, &mut self.controller);
    }
}

/// The value of a property of a controller behind connections, whose queues have at most
/// `entries_max` entries and whose CC and CSTS are these (Base 2.1 §6.5).
///
/// # Errors
///
/// If there is no such property, or it has another length.
pub fn property(
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
