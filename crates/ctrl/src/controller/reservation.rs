//! Who may touch a namespace: registrants and the reservation one of them holds (Base 2.1 §8.1.22).
//!
//! The state machine of one namespace. It knows hosts and keys, and neither commands nor
//! controllers; what a change means for other hosts goes out as [`News`].
//!
//! ```text
//!                      holder          another registrant    anyone else
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

use wire::Status;
use wire::log::event::ReservationEvent;

use crate::namespace::{Reservation, ReservationKind};

pub(super) mod commands;
pub(super) mod line;
pub(super) mod preempted;
mod record;
#[cfg(test)]
mod tests;

/// The registrants and the reservation of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reservations {
    registrants: BTreeMap<Host, Registrant>,
    held: Option<Held>,
    generation: u32,
    persists: bool,
}

/// A host, as far as reservations know it (Base 2.1 §5.1.25.1.28).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// It has given no identifier: it is whoever uses this controller until the next reset.
    Anonymous(u16),
    /// It has given a 64-bit identifier.
    Short(u64),
    /// It has given a 128-bit identifier.
    Extended(u128),
}

/// An NQN of a host; empty if it gave none.
pub(super) type HostNqn = Arc<str>;

/// A host that is registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Registrant {
    key: u64,
    /// To which NQN the identifier belongs; `None` if that is not known, or the transport has no NQNs.
    pub(super) nqn: Option<HostNqn>,
    /// From where it was registered, if hosts from there may have any name. Not written down.
    pub(super) origin: Option<Arc<str>>,
}

/// From where a host comes that may have any name, and how many registrants may come from there. Limits
/// for each NQN do not hold such hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Site {
    pub(super) name: Arc<str>,
    pub(super) most: usize,
}

/// A reservation that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// Of which type.
    pub(super) kind: ReservationKind,
    /// By whom; `None` when all registrants hold it together.
    pub(super) holder: Option<Host>,
}

/// What a change means for other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Who is to be told what.
    pub(super) notices: Vec<(Host, ReservationEvent)>,
    /// Whose outstanding commands are to be aborted.
    pub(super) aborts: Vec<Host>,
}

/// How many hosts may be registered at once.
pub(super) const REGISTRANTS_MAX: usize = 128;

/// How many of them may have the same NQN, so that one that invents identifiers leaves room for others.
/// A machine has one identifier, or two after it was installed anew.
pub(super) const REGISTRANTS_PER_NQN_MAX: usize = 4;

impl fmt::Display for Host {
    /// An identifier as a UUID, the bytes in the order in which they are sent.
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
    /// The reservation as `host` sees it: what its commands are checked against.
    pub(super) fn seen_by(&self, host: Host) -> Option<Reservation> {
        let Held { kind, .. } = self.held?;
        let is_registrant = self.registrants.contains_key(&host);
        Some(Reservation { kind, is_holder: self.is_holder(host), is_registrant })
    }

    /// Registers `host` under `key`. Registering again under the same key changes nothing
    /// (Base 2.1 §8.1.22.3).
    pub(super) fn register(
        &mut self,
        host: Host,
        nqn: Option<&HostNqn>,
        key: u64,
    ) -> Result<News, Status> {
        if key == 0 {
            return Err(Status::INVALID_FIELD);
        }
        match self.registrants.get(&host) {
            Some(registered) if registered.key != key => return Err(Status::RESERVATION_CONFLICT),
            Some(_) => {}
            None if !self.has_room_for(nqn) => return Err(Status::NOT_ENOUGH_RESOURCES),
            None => {
                self.registrants.insert(host, Registrant { key, nqn: nqn.cloned(), origin: None });
            }
        }
        self.changed();
        Ok(News::default())
    }

    /// Ends the registration of `host`, and with it a reservation that only it holds
    /// (Base 2.1 §8.1.22.4). `current` is compared unless it is `None`.
    pub(super) fn unregister(&mut self, host: Host, current: Option<u64>) -> Result<News, Status> {
        self.check_key(host, current)?;
        let mut news = News::default();
        let held_before = self.held;
        self.remove(host);
        if self.held.is_none()
            && let Some(held) = held_before
            && admits_registrants(held.kind)
        {
            self.tell_registrants(host, ReservationEvent::ReservationReleased, &mut news);
        }
        self.changed();
        Ok(news)
    }

    /// Gives the registration of `host` another key (Base 2.1 §8.1.22.3).
    pub(super) fn replace(
        &mut self,
        host: Host,
        current: Option<u64>,
        key: u64,
    ) -> Result<News, Status> {
        if key == 0 {
            return Err(Status::INVALID_FIELD);
        }
        self.check_key(host, current)?;
        if let Some(registrant) = self.registrants.get_mut(&host) {
            registrant.key = key;
        }
        self.changed();
        Ok(News::default())
    }

    /// Takes the reservation if nobody holds it. Taking again what one holds already changes
    /// nothing (Base 2.1 §8.1.22.5).
    pub(super) fn acquire(
        &mut self,
        host: Host,
        current: u64,
        kind: ReservationKind,
    ) -> Result<News, Status> {
        self.check_key(host, Some(current))?;
        match self.held {
            Some(held) if self.is_holder(host) && held.kind == kind => {}
            Some(_) => return Err(Status::RESERVATION_CONFLICT),
            None => self.take(host, kind),
        }
        Ok(News::default())
    }

    /// Removes whoever is registered under `victim_key`, and takes the reservation if that was its
    /// holder's (Base 2.1 §8.1.22.7).
    pub(super) fn preempt(
        &mut self,
        host: Host,
        current: u64,
        victim_key: u64,
        kind: ReservationKind,
        abort: bool,
    ) -> Result<News, Status> {
        self.check_key(host, Some(current))?;
        let before = self.held;
        let (victims, takes) = self.victims(host, victim_key)?;
        for &victim in &victims {
            self.remove(victim);
        }
        let mut news = News::default();
        if takes {
            self.take(host, kind);
            if before.is_some_and(|held| held.kind != kind && admits_registrants(held.kind)) {
                self.tell_registrants(host, ReservationEvent::ReservationReleased, &mut news);
            }
        } else if self.held.is_none() && before.is_some_and(|held| admits_registrants(held.kind)) {
            self.tell_registrants(host, ReservationEvent::ReservationReleased, &mut news);
        }
        let others = victims.iter().copied().filter(|&victim| victim != host);
        news.notices.extend(others.map(|victim| (victim, ReservationEvent::RegistrationPreempted)));
        news.aborts = if abort { victims } else { Vec::new() };
        self.changed();
        Ok(news)
    }

    /// Gives the reservation back. A registrant that does not hold it changes nothing
    /// (Base 2.1 §8.1.22.6).
    pub(super) fn release(
        &mut self,
        host: Host,
        current: u64,
        kind: ReservationKind,
    ) -> Result<News, Status> {
        self.check_key(host, Some(current))?;
        let mut news = News::default();
        if let Some(held) = self.held.filter(|_| self.is_holder(host)) {
            if held.kind != kind {
                return Err(Status::INVALID_FIELD);
            }
            self.held = None;
            if admits_registrants(kind) {
                self.tell_registrants(host, ReservationEvent::ReservationReleased, &mut news);
            }
        }
        Ok(news)
    }

    /// Ends the reservation and every registration (Base 2.1 §8.1.22.8).
    pub(super) fn clear(&mut self, host: Host, current: u64) -> Result<News, Status> {
        self.check_key(host, Some(current))?;
        let mut news = News::default();
        self.tell_registrants(host, ReservationEvent::ReservationPreempted, &mut news);
        self.registrants.clear();
        self.held = None;
        self.changed();
        Ok(news)
    }

    /// Whether the state survives a power cycle (PTPL).
    pub(super) const fn persists(&self) -> bool {
        self.persists
    }

    /// Decides whether the state survives a power cycle.
    pub(super) const fn set_persists(&mut self, persists: bool) {
        self.persists = persists;
    }

    /// The power went and came back: what was not to persist is gone (Base 2.1 §8.1.22.1).
    pub(super) fn power_cycled(&mut self) {
        if !self.persists {
            *self = Self::default();
        }
    }

    /// Forgets a host that can never come back: one without an identifier whose controller was
    /// reset (Base 2.1 §5.1.25.1.28).
    pub(super) fn forget(&mut self, host: Host) {
        if self.registrants.contains_key(&host) {
            self.remove(host);
        }
    }

    /// How often the registrations have changed (GEN).
    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// The reservation, if there is one.
    pub(super) const fn held(&self) -> Option<Held> {
        self.held
    }

    /// Whether `host` holds the reservation, alone or with all registrants.
    pub(super) fn is_holder(&self, host: Host) -> bool {
        self.held.is_some_and(|held| match held.holder {
            Some(holder) => holder == host,
            None => self.registrants.contains_key(&host),
        })
    }

    /// Every registrant with its key.
    pub(super) fn registrants(&self) -> impl Iterator<Item = (Host, u64)> + '_ {
        self.registrants.iter().map(|(&host, registrant)| (host, registrant.key))
    }

    /// Every registrant whose NQN is known.
    pub(super) fn named_registrants(&self) -> impl Iterator<Item = (Host, &HostNqn)> {
        self.registrants.iter().filter_map(|(host, it)| Some((*host, it.nqn.as_ref()?)))
    }

    /// The NQN of a registrant, if it is one and that is known.
    pub(super) fn nqn_of(&self, host: Host) -> Option<&HostNqn> {
        self.registrants.get(&host).and_then(|registrant| registrant.nqn.as_ref())
    }

    pub(super) fn registrant_mut(&mut self, host: Host) -> Option<&mut Registrant> {
        self.registrants.get_mut(&host)
    }

    /// Whether a host from there may be registered, as far as others from there are.
    pub(super) fn check_origin(&self, host: Host, origin: &Site) -> Result<(), Status> {
        let is_from_there = |it: &&Registrant| it.origin.as_ref() == Some(&origin.name);
        let same = self.registrants.values().filter(is_from_there).count();
        let has_room = same < origin.most || self.registrants.contains_key(&host);
        has_room.then_some(()).ok_or(Status::NOT_ENOUGH_RESOURCES)
    }

    /// A host was registered from there.
    pub(super) fn came_from(&mut self, host: Host, origin: &Site) {
        if let Some(registrant) = self.registrants.get_mut(&host) {
            registrant.origin.get_or_insert_with(|| Arc::clone(&origin.name));
        }
    }

    fn has_room_for(&self, nqn: Option<&HostNqn>) -> bool {
        let same = self.registrants.values().filter(|it| it.nqn.as_ref() == nqn).count();
        let most = if nqn.is_some() { REGISTRANTS_PER_NQN_MAX } else { REGISTRANTS_MAX };
        self.registrants.len() < REGISTRANTS_MAX && same < most
    }

    /// Who loses the registration to a preemption, and whether the reservation changes hands.
    fn victims(&self, host: Host, victim_key: u64) -> Result<(Vec<Host>, bool), Status> {
        let under_key = |except: Option<Host>| -> Vec<Host> {
            let matching = self.registrants().filter(|&(_, key)| key == victim_key);
            matching.map(|(victim, _)| victim).filter(|&victim| Some(victim) != except).collect()
        };
        let holder_key = match self.held {
            Some(Held { holder: None, .. }) if victim_key == 0 => {
                let all = self.registrants().map(|(victim, _)| victim);
                return Ok((all.filter(|&victim| victim != host).collect(), true));
            }
            Some(Held { holder: Some(holder), .. }) => {
                if victim_key == 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.registrants.get(&holder).map(|registrant| registrant.key)
            }
            Some(Held { holder: None, .. }) | None => None,
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

    fn check_key(&self, host: Host, current: Option<u64>) -> Result<(), Status> {
        let registered = self.registrants.get(&host).ok_or(Status::RESERVATION_CONFLICT)?;
        match current {
            Some(key) if key != registered.key => Err(Status::RESERVATION_CONFLICT),
            _ => Ok(()),
        }
    }

    fn take(&mut self, host: Host, kind: ReservationKind) {
        let holder = if is_held_by_all(kind) { None } else { Some(host) };
        self.held = Some(Held { kind, holder });
    }

    /// Removes a registration, and the reservation if nobody is left to hold it.
    fn remove(&mut self, host: Host) {
        self.registrants.remove(&host);
        let orphaned = self.held.is_some_and(|held| match held.holder {
            Some(holder) => holder == host,
            None => self.registrants.is_empty(),
        });
        if orphaned {
            self.held = None;
        }
    }

    fn tell_registrants(&self, except: Host, notice: ReservationEvent, news: &mut News) {
        let others = self.registrants.keys().filter(|&&host| host != except);
        news.notices.extend(others.map(|&host| (host, notice)));
    }

    const fn changed(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

/// Whether every registrant is a holder.
const fn is_held_by_all(kind: ReservationKind) -> bool {
    matches!(
        kind,
        ReservationKind::WriteExclusiveAllRegistrants
            | ReservationKind::ExclusiveAccessAllRegistrants
    )
}

/// Whether registrants that do not hold it are let through.
const fn admits_registrants(kind: ReservationKind) -> bool {
    !matches!(kind, ReservationKind::WriteExclusive | ReservationKind::ExclusiveAccess)
}
