//! A store gains room while it is open: what its devices have gained, and devices that are added.
//!
//! ```text
//!   who grows it     labels, flushed | a channel for each who has one | the commit that counts them
//!   who has a channel                       ...finds it among his notes, before any address on it
//! ```
//!
//! Whoever moves data or metadata has his own way to the devices. He is given a channel to what is new
//! by a note, and is told of no block there before it has come: notes are in order, and blocks are given
//! out only after the commit. So nobody looks for it on the way of an I/O.

use std::sync::Arc;

use base::{Backend, Blame, Durability, Limits, Medium, Operation};
use host::machine::Machine;
use volume::devices::{Devices, LABEL_BLOCKS, Label, Other};
use volume::format::STORE_BLOCKS_MIN;
use volume::{Answer, Ask};

use super::absent::Absent;
use super::ground::{DeviceInfo, Ground, Member, label_said};
use super::make::make_files;
use super::raw::Raw;
use super::spans::{Leg, Spans, unbounded};
use super::{OpenStore, PAGE_BYTES};
use crate::backend::legs::LegsChannel;
use crate::identity::DeviceIdentity;
use crate::open::Opener;
use crate::uri::Uri;
use crate::{MediumError, guard};

/// What has come of growing a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grown {
    /// Blocks of 4 KiB that it had.
    pub before: u64,
    /// Blocks that it has.
    pub blocks: u64,
    /// Devices that were named and are its own already, by their numbers.
    pub were_there: Vec<u32>,
    /// All that it lies on now.
    pub devices: Vec<DeviceInfo>,
}

/// A way to one device more, for somebody who has a way to those before it.
pub(super) struct More {
    /// Its first leg is missing.
    pub(super) channel: Box<LegsChannel<Spans>>,
    /// Pages that each device takes at once now.
    pub(super) request_pages: u32,
}

/// A device that is to be added.
struct New {
    member: Member,
    uuid: u128,
}

impl std::fmt::Debug for More {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("More").finish_non_exhaustive()
    }
}

impl More {
    /// The way to all, for who owes so many answers.
    pub(super) fn behind(mut self, first: Box<dyn Backend>, owed: usize) -> Box<dyn Backend> {
        self.channel.put_first(first, owed);
        self.channel
    }
}

impl OpenStore {
    /// The devices that it lies on.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        let ground = self.ground();
        ground.infos(self.shared.lock().store.devices())
    }

    /// Gives the store what its devices have gained since, and devices that are added, which must hold
    /// nothing unless `overwrite` is set. Others go on meanwhile.
    ///
    /// # Errors
    ///
    /// If a device cannot be had, is too small, holds something or is another's; or if what is written
    /// to it or to the store fails. The store is as large as it was then.
    pub fn grow(
        &self,
        opener: &Opener<'_>,
        added: &[Uri],
        overwrite: bool,
    ) -> Result<Grown, MediumError> {
        let mut ground = self.ground();
        let state = self.shared.lock();
        let (mut devices, before) = (state.store.next_devices().clone(), state.store.blocks());
        drop(state);
        ground.members.truncate(devices.count());
        ground.notice(&mut devices)?;
        let mut were_there = Vec::new();
        let mut new: Vec<New> = Vec::new();
        for uri in added {
            let (found, identity) = (uri.clone().to_find(), DeviceIdentity::of_uri(uri));
            let is_it = |member: &Member| {
                member.uri.clone().to_find() == found || member.identity.is_same(&identity)
            };
            match ground.members.iter().position(is_it) {
                Some(number) => were_there.push(u32::try_from(number).unwrap_or(u32::MAX)),
                None => new.push(self.look_at_new(opener, uri, &devices, &new, overwrite)?),
            }
        }
        for one in &new {
            let (uuid, uri) = (one.uuid, one.member.uri.to_string());
            devices.add(Other { uuid, uri }, one.member.shape.pages);
        }
        devices.check().map_err(|error| self.refuse(&error))?;
        self.expect_no_stricter(&ground, &new)?;
        make_files()?;
        let first_uri = ground.members[0].uri.clone().to_find().to_string();
        for one in new {
            let number = u32::try_from(ground.members.len()).unwrap_or(u32::MAX);
            let label = self.label_of(&one, number, &devices, &first_uri);
            self.reserved.add(&one.member.opened.medium)?;
            write_label(opener, &one.member, &label)?;
            ground.members.push(one.member);
        }
        self.spread(&mut ground, &devices)?;
        match self.ask(Ask::Grow(devices.clone()))? {
            Answer::Done => {}
            _ => return Err(self.machine("grow: found another answer, expected an end".into())),
        }
        let blocks = devices.blocks();
        Ok(Grown { before, blocks, were_there, devices: ground.infos(&devices) })
    }

    /// Writes down where the devices have been found, if that is not where they were said to be. Says
    /// whether it was not.
    ///
    /// # Errors
    ///
    /// If it could not be written.
    pub fn note_places(&self) -> Result<bool, MediumError> {
        let ground = self.ground();
        let mut devices = self.shared.lock().store.next_devices().clone();
        let before = devices.clone();
        for (other, member) in devices.others.iter_mut().zip(&ground.members[1..]) {
            other.uri = member.uri.to_string();
        }
        devices.check().map_err(|error| self.refuse(&error))?;
        if devices != before {
            self.ask(Ask::Grow(devices))?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Writes down that a device, which this process has open, is found at another place from now on. Says
    /// whether it was not said to be there already.
    ///
    /// # Errors
    ///
    /// If there is no such device, what is there is another one, or it could not be written.
    pub fn note_place(
        &self,
        opener: &Opener<'_>,
        number: u32,
        uri: &Uri,
    ) -> Result<bool, MediumError> {
        let name = self.name();
        let mut ground = self.ground();
        let last = ground.members.len() - 1;
        let refuse = |text: String| MediumError::new(Blame::Caller, text);
        let Some(member) = ground.members.get_mut(number as usize).filter(|_| number > 0) else {
            let text =
                format!("store `{name}`: it has no device {number}, expected {last} at most");
            return Err(refuse(text));
        };
        if !leads_to(opener, uri, &member.identity) {
            let text = format!(
                "store `{name}`: {uri} is not device {number} of it, which process {} has open and calls \
                 {}; expected that one under another name",
                std::process::id(),
                member.uri
            );
            let hint = "To put a copy in its place, end the process, and say it again.";
            return Err(refuse(text).with_hint(hint));
        }
        let before = std::mem::replace(&mut member.uri, uri.clone());
        drop(ground);
        self.note_places().inspect_err(|_| self.ground().members[number as usize].uri = before)
    }

    /// Looks at what is to be added.
    fn look_at_new(
        &self,
        opener: &Opener<'_>,
        uri: &Uri,
        devices: &Devices,
        new: &[New],
        overwrite: bool,
    ) -> Result<New, MediumError> {
        let refuse = |problem: String| MediumError::new(Blame::Caller, format!("{uri}: {problem}"));
        let mut member = Member::of(uri, opener.open(uri)?)?;
        member.uri = uri.clone().to_find();
        let (found, needed) = (member.shape.pages, STORE_BLOCKS_MIN + LABEL_BLOCKS);
        if found < needed {
            let problem = format!("it has {found} blocks of 4 KiB, expected {needed} at least");
            return Err(refuse(problem));
        }
        let label = Label::decode(&member.first_page(opener)?).ok();
        let ours = label.filter(|label| label.store == self.uuid());
        let is_known = |uuid: u128| devices.others.iter().any(|other| other.uuid == uuid);
        if let Some(label) = ours.as_ref().filter(|label| is_known(label.uuid)) {
            let said = label_said(label);
            return Err(refuse(format!(
                "{said}, or a copy of that, expected one that is new to it"
            )));
        }
        if ours.as_ref().is_some_and(|label| new.iter().any(|one| one.uuid == label.uuid)) {
            return Err(refuse("it is given twice, expected once".into()));
        }
        // A label of this store that no superblock counts was written before a loss of power.
        if ours.is_none() {
            guard::allow("store grow", &member.opened.existing, overwrite, &Machine::this())?;
        }
        if member.uri != *uri {
            // What it is called from now on must find it, too.
            let found = member.uri.clone();
            drop(member);
            member = Member::of(&found, opener.open(&found)?)?;
        }
        let uuid = u128::from(host::random_seed()) << 64 | u128::from(host::random_seed());
        Ok(New { member, uuid })
    }

    /// Volumes that are open were told what their devices can do.
    fn expect_no_stricter(&self, ground: &Ground, new: &[New]) -> Result<(), MediumError> {
        if self.shared.lock().volumes_open == 0 {
            return Ok(());
        }
        let now = ground.medium.limits();
        for one in new {
            if let Some(problem) = stricter(&now, ground.shape.request_pages, &one.member) {
                let text =
                    format!("{}: {problem}, while volumes of the store are open", one.member.uri);
                let hint = "Close them, and grow the store then.";
                return Err(MediumError::new(Blame::Caller, text).with_hint(hint));
            }
        }
        Ok(())
    }

    /// What a new device is to begin with.
    fn label_of(&self, new: &New, number: u32, devices: &Devices, first_uri: &str) -> Label {
        let state = self.shared.lock();
        Label {
            store: state.store.uuid(),
            name: state.store.name(),
            number,
            uuid: new.uuid,
            generation: state.store.transaction(),
            begin: devices.begin(number),
            first_uri: first_uri.to_owned(),
        }
    }

    /// Gives everybody who has a way to the devices one to those that are new.
    fn spread(&self, ground: &mut Ground, devices: &Devices) -> Result<(), MediumError> {
        let old = self.shared.lock().store.next_devices().runs().count();
        let (limits, shape) = (ground.medium.limits(), ground.shape);
        ground.join(devices);
        for (begin, run) in devices.runs().skip(old) {
            let medium = Arc::clone(&ground.members[run.device as usize].opened.medium);
            let leg = Leg { medium, begin, at: run.at };
            let more = || {
                let legs = vec![Absent(limits.clone()).channel()?, leg.medium.channel()?];
                let spans = Spans::behind(&leg, shape.block_size);
                let channel = LegsChannel::new(legs, spans, unbounded(&limits))?;
                let request_pages = ground.shape.request_pages;
                Ok(More { channel: Box::new(channel), request_pages })
            };
            self.shared.give_more(more).map_err(|problem: String| self.machine(problem))?;
        }
        Ok(())
    }

    fn machine(&self, problem: String) -> MediumError {
        MediumError::new(Blame::Machine, format!("{}: grow: {problem}", self.name))
    }
}

/// Writes a label, durably. What was a store there is one no longer.
fn write_label(opener: &Opener<'_>, member: &Member, label: &Label) -> Result<(), MediumError> {
    let Member { uri, opened, shape, .. } = member;
    let refuse = |blame, problem: String| MediumError::new(blame, format!("{uri}: {problem}"));
    let bytes = label.encode().map_err(|error| refuse(error.blame(), error.to_string()))?;
    let raw = Raw::open(opener.regions, &opener.clock, &*opened.medium, shape);
    let mut raw = raw.map_err(|problem| refuse(Blame::Machine, problem))?;
    let mut write = || {
        for at in [1, shape.pages - 2, shape.pages - 1] {
            raw.write(at, &[0; 4096])?;
        }
        raw.write(0, &bytes)?;
        raw.flush()
    };
    write().map_err(|outcome| {
        let problem = format!("write its label: status {:#x}, expected 0", outcome.0);
        refuse(Blame::Peer, problem)
    })
}

impl Ground {
    /// Looks how long the devices are now. The last one first, since what lies there goes on.
    fn notice(&mut self, devices: &mut Devices) -> Result<(), MediumError> {
        let last = devices.spans.last().map_or(0, |span| span.device);
        let others = (0..).take(self.members.len()).filter(|number| *number != last);
        for number in [last].into_iter().chain(others.collect::<Vec<u32>>()) {
            let member = &mut self.members[number as usize];
            let found = member.opened.medium.notice_size();
            let blocks = found.map_err(|problem| {
                MediumError::new(Blame::Machine, format!("{}: {problem}", member.uri))
            })?;
            member.shape.pages = blocks / member.shape.blocks_in_page;
            let (pages, needed) = (member.shape.pages, devices.needs(number));
            if pages < needed {
                let text = format!(
                    "{}: device {number} of the store has {pages} blocks of 4 KiB, expected {needed} at \
                     least",
                    member.uri
                );
                return Err(MediumError::new(Blame::Caller, text));
            }
            devices.gain(number, pages);
        }
        Ok(())
    }
}

/// What a device can do less than what is there.
fn stricter(now: &Limits, request_pages: u32, member: &Member) -> Option<String> {
    let limits = member.opened.medium.limits();
    let weaker = now.durability.weaker(Durability::VolatileCache);
    let needs = super::READING.into_iter().chain([Operation::Write]);
    let lacks = needs.filter(|needs| now.support.has(*needs));
    let lacks = lacks.into_iter().find(|needs| !limits.support.has(*needs));
    let found = member.shape.request_pages;
    if found < request_pages {
        let (found, expected) = (found * PAGE_BYTES, request_pages * PAGE_BYTES);
        return Some(format!("it takes {found} bytes at once, expected {expected} at least"));
    }
    if limits.segments_max < now.segments_max {
        let (found, expected) = (limits.segments_max, now.segments_max);
        return Some(format!("it takes {found} pieces of memory at once, expected {expected}"));
    }
    if limits.depth_max < now.depth_max && limits.depth_max < super::DEPTH_MAX {
        let (found, expected) = (limits.depth_max, now.depth_max.min(super::DEPTH_MAX));
        return Some(format!("it takes {found} requests at once, expected {expected} at least"));
    }
    if weaker.weaker(limits.durability) != weaker {
        let (found, expected) = (limits.durability.describe(), now.durability.describe());
        return Some(format!("{found}, expected that {expected}"));
    }
    lacks.map(|lacks| format!("it has no {}, expected one", lacks.name()))
}

/// Whether a URI leads to this device: a namespace by another address is known once it is open.
fn leads_to(opener: &Opener<'_>, uri: &Uri, device: &DeviceIdentity) -> bool {
    let way = uri.clone().to_read();
    device.is_same(&DeviceIdentity::of_uri(&way))
        || opener.open(&way).is_ok_and(|it| device.is_same(&DeviceIdentity::of_opened(&way, &it)))
}
