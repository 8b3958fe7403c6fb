//! Reservations: registrants of a namespace and the reservation held by one of them (Base 2.1 §8.1.22).
//!
//! State machine of one namespace. It handles hosts and keys, and is independent of commands and
//! controllers; the consequences for other hosts are returned as [`ReservationChangeEffects`].
//!
//! ```text
//!                      holder          another registrant    other hosts
//!                      read  write     read  write           read  write
//!   none               yes   yes       yes   yes             yes   yes
//!   1 WE               yes   yes       yes   no              yes   no
//!   2 EA               yes   yes       no    no              no    no
//!   3 WE, registrants  yes   yes       yes   yes             yes   no
//!   4 EA, registrants  yes   yes       yes   yes             no    no
//!   5 WE, all          yes   yes       —  (all hold it)      yes   no
//!   6 EA, all          yes   yes       —                     no    no
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tenmil_wire::Status;
use tenmil_wire::log::event::ReservationEvent;

use crate::namespace::{Reservation, ReservationKind};

pub(super) mod change_queue;
pub(super) mod commands;
mod persistent_record;
pub(super) mod preempt_abort;
#[cfg(test)]
mod tests;

/// Registrants and reservation of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reservations {
    registrants: BTreeMap<HostId, Registrant>,
    active: Option<ActiveReservation>,
    generation: u32,
    persists_through_power_loss: bool,
}

/// Host identifier, as used for reservations (Base 2.1 §5.1.25.1.28).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostId {
    /// No identifier: the host that uses this controller until the next reset.
    Anonymous(u16),
    /// 64-bit identifier.
    Short(u64),
    /// 128-bit identifier.
    Extended(u128),
}

/// Host NQN; empty if the host gave none.
pub(super) type HostNqn = Arc<str>;

/// Registered host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Registrant {
    key: u64,
    /// NQN to which the identifier belongs; `None` if unknown, or if the transport has no host NQNs.
    pub(super) nqn: Option<HostNqn>,
    /// Network origin of the registration, if hosts from there may use any NQN. Not persisted.
    pub(super) origin: Option<Arc<str>>,
}

/// Network origin whose hosts may use any NQN, with the maximum number of registrants from there. Per-NQN
/// limits are ineffective for such hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OriginRegistrantLimit {
    pub(super) name: Arc<str>,
    pub(super) count_max: usize,
}

/// Reservation that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ActiveReservation {
    /// Reservation type.
    pub(super) kind: ReservationKind,
    /// Holder; `None` if all registrants are holders.
    pub(super) holder: Option<HostId>,
}

/// Consequences of a change for other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReservationChangeEffects {
    /// Notifications, with the hosts that get them.
    pub(super) notices: Vec<(HostId, ReservationEvent)>,
    /// Hosts whose outstanding commands are aborted.
    pub(super) aborts: Vec<HostId>,
}

/// Maximum number of registrants.
pub(super) const REGISTRANTS_MAX: usize = 128;

/// Maximum registrants with the same NQN, so that a host that invents identifiers cannot exhaust the
/// table. A machine has one identifier, or two after a reinstallation.
pub(super) const REGISTRANTS_PER_NQN_MAX: usize = 4;

impl fmt::Display for HostId {
    /// Formats an identifier as a UUID, with the bytes in wire order.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous(cntlid) => write!(out, "none (controller {cntlid})"),
            Self::Short(id) => write!(out, "{:016x}", id.swap_bytes()),
            Self::Extended(id) => {
                let digits = format!("{:032x}", id.swap_bytes());
                let groups = [0..8, 8..12, 12..16, 16..20, 20..32];
                out.write_str(&groups.map(|group| &digits[group]).join("-"))
            }
        }
    }
}

impl Reservations {
    /// Reservation relative to `host`, for the check of its commands.
    pub(super) fn as_seen_by(&self, host: HostId) -> Option<Reservation> {
        let ActiveReservation { kind, .. } = self.active?;
        let is_registrant = self.registrants.contains_key(&host);
        Some(Reservation { kind, is_holder: self.is_holder(host), is_registrant })
    }

    /// Registers `host` with `key`. Registering again with the same key changes nothing (Base 2.1
    /// §8.1.22.3).
    pub(super) fn register(
        &mut self,
        host: HostId,
        nqn: Option<&HostNqn>,
        key: u64,
    ) -> Result<ReservationChangeEffects, Status> {
        if key == 0 {
            return Err(Status::INVALID_FIELD);
        }
        match self.registrants.get(&host) {
            Some(registered) if registered.key != key => return Err(Status::RESERVATION_CONFLICT),
            Some(_) => {}
            None if !self.has_room_for_registrant(nqn) => return Err(Status::NOT_ENOUGH_RESOURCES),
            None => {
                self.registrants.insert(host, Registrant { key, nqn: nqn.cloned(), origin: None });
            }
        }
        self.increment_generation();
        Ok(ReservationChangeEffects::default())
    }

    /// Unregisters `host`, and releases a reservation that only it holds (Base 2.1 §8.1.22.4). `current`
    /// is compared unless it is `None`.
    pub(super) fn unregister(
        &mut self,
        host: HostId,
        current: Option<u64>,
    ) -> Result<ReservationChangeEffects, Status> {
        self.check_key(host, current)?;
        let mut effects = ReservationChangeEffects::default();
        let held_before = self.active;
        self.remove_registration(host);
        if self.active.is_none()
            && let Some(held) = held_before
            && gives_registrants_access(held.kind)
        {
            self.add_registrant_notices(host, ReservationEvent::ReservationReleased, &mut effects);
        }
        self.increment_generation();
        Ok(effects)
    }

    /// Replaces the key of `host` (Base 2.1 §8.1.22.3).
    pub(super) fn replace_key(
        &mut self,
        host: HostId,
        current: Option<u64>,
        key: u64,
    ) -> Result<ReservationChangeEffects, Status> {
        if key == 0 {
            return Err(Status::INVALID_FIELD);
        }
        self.check_key(host, current)?;
        if let Some(registrant) = self.registrants.get_mut(&host) {
            registrant.key = key;
        }
        self.increment_generation();
        Ok(ReservationChangeEffects::default())
    }

    /// Acquires the reservation if there is none. Acquiring it again as its holder changes nothing (Base
    /// 2.1 §8.1.22.5).
    pub(super) fn acquire(
        &mut self,
        host: HostId,
        current: u64,
        kind: ReservationKind,
    ) -> Result<ReservationChangeEffects, Status> {
        self.check_key(host, Some(current))?;
        match self.active {
            Some(held) if self.is_holder(host) && held.kind == kind => {}
            Some(_) => return Err(Status::RESERVATION_CONFLICT),
            None => self.set_holder(host, kind),
        }
        Ok(ReservationChangeEffects::default())
    }

    /// Unregisters the hosts with `victim_key`, and acquires the reservation if its holder has that key
    /// (Base 2.1 §8.1.22.7).
    pub(super) fn preempt(
        &mut self,
        host: HostId,
        current: u64,
        victim_key: u64,
        kind: ReservationKind,
        abort: bool,
    ) -> Result<ReservationChangeEffects, Status> {
        self.check_key(host, Some(current))?;
        let before = self.active;
        let (victims, acquires) = self.preemption_victims(host, victim_key)?;
        for &victim in &victims {
            self.remove_registration(victim);
        }
        let mut effects = ReservationChangeEffects::default();
        // Registrants are notified of a release if they lose access that the old type gave them.
        if acquires {
            self.set_holder(host, kind);
            if before.is_some_and(|held| held.kind != kind && gives_registrants_access(held.kind)) {
                self.add_registrant_notices(
                    host,
                    ReservationEvent::ReservationReleased,
                    &mut effects,
                );
            }
        } else if self.active.is_none()
            && before.is_some_and(|held| gives_registrants_access(held.kind))
        {
            self.add_registrant_notices(host, ReservationEvent::ReservationReleased, &mut effects);
        }
        let others = victims.iter().copied().filter(|&victim| victim != host);
        effects
            .notices
            .extend(others.map(|victim| (victim, ReservationEvent::RegistrationPreempted)));
        effects.aborts = if abort { victims } else { Vec::new() };
        self.increment_generation();
        Ok(effects)
    }

    /// Releases the reservation. Has no effect for a registrant that is not a holder (Base 2.1
    /// §8.1.22.6).
    pub(super) fn release_and_unregister(
        &mut self,
        host: HostId,
        current: u64,
        kind: ReservationKind,
    ) -> Result<ReservationChangeEffects, Status> {
        self.check_key(host, Some(current))?;
        let mut effects = ReservationChangeEffects::default();
        if let Some(held) = self.active.filter(|_| self.is_holder(host)) {
            if held.kind != kind {
                return Err(Status::INVALID_FIELD);
            }
            self.active = None;
            if gives_registrants_access(kind) {
                self.add_registrant_notices(
                    host,
                    ReservationEvent::ReservationReleased,
                    &mut effects,
                );
            }
        }
        Ok(effects)
    }

    /// Releases the reservation and unregisters all hosts (Base 2.1 §8.1.22.8).
    pub(super) fn clear(
        &mut self,
        host: HostId,
        current: u64,
    ) -> Result<ReservationChangeEffects, Status> {
        self.check_key(host, Some(current))?;
        let mut effects = ReservationChangeEffects::default();
        self.add_registrant_notices(host, ReservationEvent::ReservationPreempted, &mut effects);
        self.registrants.clear();
        self.active = None;
        self.increment_generation();
        Ok(effects)
    }

    /// Whether the state persists through power loss (PTPL).
    pub(super) const fn persists_through_power_loss(&self) -> bool {
        self.persists_through_power_loss
    }

    /// Sets whether the state persists through power loss.
    pub(super) const fn set_persists_through_power_loss(&mut self, persists: bool) {
        self.persists_through_power_loss = persists;
    }

    /// Handles a power cycle: drops the state unless it persists (Base 2.1 §8.1.22.1).
    pub(super) fn handle_power_cycle(&mut self) {
        if !self.persists_through_power_loss {
            *self = Self::default();
        }
    }

    /// Removes a host that cannot return: one without an identifier whose controller was reset (Base 2.1
    /// §5.1.25.1.28).
    pub(super) fn remove_host(&mut self, host: HostId) {
        if self.registrants.contains_key(&host) {
            self.remove_registration(host);
        }
    }

    /// Number of registration changes (GEN).
    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// The reservation, if there is one.
    pub(super) const fn active_reservation(&self) -> Option<ActiveReservation> {
        self.active
    }

    /// Whether `host` is a holder, alone or with all registrants.
    pub(super) fn is_holder(&self, host: HostId) -> bool {
        self.active.is_some_and(|held| match held.holder {
            Some(holder) => holder == host,
            None => self.registrants.contains_key(&host),
        })
    }

    /// All registrants with their keys.
    pub(super) fn registrants(&self) -> impl Iterator<Item = (HostId, u64)> + '_ {
        self.registrants.iter().map(|(&host, registrant)| (host, registrant.key))
    }

    /// All registrants whose NQN is known.
    pub(super) fn registrants_with_nqn(&self) -> impl Iterator<Item = (HostId, &HostNqn)> {
        self.registrants.iter().filter_map(|(host, it)| Some((*host, it.nqn.as_ref()?)))
    }

    /// NQN of a registrant, if known.
    pub(super) fn nqn_of(&self, host: HostId) -> Option<&HostNqn> {
        self.registrants.get(&host).and_then(|registrant| registrant.nqn.as_ref())
    }

    pub(super) fn registrant_mut(&mut self, host: HostId) -> Option<&mut Registrant> {
        self.registrants.get_mut(&host)
    }

    /// Checks the registrant limit of an origin for `host`.
    pub(super) fn check_origin_limit(
        &self,
        host: HostId,
        origin: &OriginRegistrantLimit,
    ) -> Result<(), Status> {
        let is_from_there = |it: &&Registrant| it.origin.as_ref() == Some(&origin.name);
        let same = self.registrants.values().filter(is_from_there).count();
        let has_space = same < origin.count_max || self.registrants.contains_key(&host);
        has_space.then_some(()).ok_or(Status::NOT_ENOUGH_RESOURCES)
    }

    /// Records the origin of a registrant.
    pub(super) fn set_origin(&mut self, host: HostId, origin: &OriginRegistrantLimit) {
        if let Some(registrant) = self.registrants.get_mut(&host) {
            registrant.origin.get_or_insert_with(|| Arc::clone(&origin.name));
        }
    }

    fn has_room_for_registrant(&self, nqn: Option<&HostNqn>) -> bool {
        let same = self.registrants.values().filter(|it| it.nqn.as_ref() == nqn).count();
        let count_max = if nqn.is_some() { REGISTRANTS_PER_NQN_MAX } else { REGISTRANTS_MAX };
        self.registrants.len() < REGISTRANTS_MAX && same < count_max
    }

    /// Hosts that a preemption unregisters, and whether the reservation changes its holder.
    fn preemption_victims(
        &self,
        host: HostId,
        victim_key: u64,
    ) -> Result<(Vec<HostId>, bool), Status> {
        let under_key = |except: Option<HostId>| -> Vec<HostId> {
            let matching = self.registrants().filter(|&(_, key)| key == victim_key);
            matching.map(|(victim, _)| victim).filter(|&victim| Some(victim) != except).collect()
        };
        let holder_key = match self.active {
            Some(ActiveReservation { holder: None, .. }) if victim_key == 0 => {
                let all = self.registrants().map(|(victim, _)| victim);
                return Ok((all.filter(|&victim| victim != host).collect(), true));
            }
            Some(ActiveReservation { holder: Some(holder), .. }) => {
                if victim_key == 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.registrants.get(&holder).map(|registrant| registrant.key)
            }
            Some(ActiveReservation { holder: None, .. }) | None => None,
        };
        if holder_key == Some(victim_key) {
            return Ok((under_key(Some(host)), true));
        }
        let victims = under_key(None);
        if victims.is_empty() {
            return Err(Status::RESERVATION_CONFLICT);
        }
        Ok((victims, false))
    }

    fn check_key(&self, host: HostId, current: Option<u64>) -> Result<(), Status> {
        let registered = self.registrants.get(&host).ok_or(Status::RESERVATION_CONFLICT)?;
        match current {
            Some(key) if key != registered.key => Err(Status::RESERVATION_CONFLICT),
            _ => Ok(()),
        }
    }

    fn set_holder(&mut self, host: HostId, kind: ReservationKind) {
        let holder = if is_all_registrants_type(kind) { None } else { Some(host) };
        self.active = Some(ActiveReservation { kind, holder });
    }

    /// Removes a registration, and the reservation if no holder is left.
    fn remove_registration(&mut self, host: HostId) {
        self.registrants.remove(&host);
        let orphaned = self.active.is_some_and(|held| match held.holder {
            Some(holder) => holder == host,
            None => self.registrants.is_empty(),
        });
        if orphaned {
            self.active = None;
        }
    }

    fn add_registrant_notices(
        &self,
        except: HostId,
        notice: ReservationEvent,
        effects: &mut ReservationChangeEffects,
    ) {
        let others = self.registrants.keys().filter(|&&host| host != except);
        effects.notices.extend(others.map(|&host| (host, notice)));
    }

    const fn increment_generation(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

/// Whether every registrant is a holder.
const fn is_all_registrants_type(kind: ReservationKind) -> bool {
    matches!(
        kind,
        ReservationKind::WriteExclusiveAllRegistrants
            | ReservationKind::ExclusiveAccessAllRegistrants
    )
}

/// Whether registrants other than the holder have access.
const fn gives_registrants_access(kind: ReservationKind) -> bool {
    !matches!(kind, ReservationKind::WriteExclusive | ReservationKind::ExclusiveAccess)
}
