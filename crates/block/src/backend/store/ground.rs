//! What an open store lies on: its first device, which is named, and the others, which that one names.
//!
//! A device is known by its label, wherever it is found. Where it is said to be is written down in the
//! superblock; whoever moves one says so once (`tenmil store set --device 1=URI`).

use std::ops::Range;
use std::sync::Arc;

use base::{Blame, Medium};
use volume::Store;
use volume::devices::{Devices, Label, Other};
use volume::format::decode_superblock;

use super::absent::Absent;
use super::raw::Raw;
use super::spans::{Leg, Spanned};
use super::{PAGE_BYTES, Place, Shape};
use crate::MediumError;
use crate::identity::DeviceIdentity;
use crate::open::{Opened, Opener};
use crate::uri::Uri;

/// What an open store lies on.
pub(super) struct Ground {
    /// All devices as one; the first one itself if there are no others.
    pub(super) medium: Arc<dyn Medium>,
    pub(super) shape: Shape,
    /// In the order of their numbers.
    pub(super) members: Vec<Member>,
}

/// A device of an open store.
pub(super) struct Member {
    pub(super) uri: Uri,
    pub(super) opened: Opened,
    pub(super) shape: Shape,
    /// Which device it is, wherever it goes.
    pub(super) identity: DeviceIdentity,
    /// Whether it could be had.
    is_there: bool,
}

/// A device of a store, as it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number: zero is the first one.
    pub number: u32,
    /// Where it is.
    pub uri: String,
    /// Blocks of 4 KiB of the store that lie on it.
    pub blocks: u64,
}

impl Member {
    pub(super) fn of(uri: &Uri, opened: Opened) -> Result<Self, MediumError> {
        let shape = Shape::of(uri, &opened.medium.limits())?;
        let identity = DeviceIdentity::of_opened(uri, &opened);
        Ok(Self { uri: uri.clone(), opened, shape, identity, is_there: true })
    }

    fn missing(uri: &Uri, like: &Self) -> Self {
        let medium = Arc::new(Absent(like.opened.medium.limits()));
        let opened = Opened::fresh(medium, format!("{uri}, which is not there"));
        let (shape, identity) = (like.shape, DeviceIdentity::of_uri(uri));
        Self { uri: uri.clone(), opened, shape, identity, is_there: false }
    }

    /// What it lacks, if it is shorter than its part of the store.
    fn lacks(&self, devices: &Devices, number: u32) -> Option<String> {
        let (found, needed) = (self.shape.pages, devices.needs(number));
        let page = u64::from(PAGE_BYTES);
        let (found_bytes, needed_bytes) = (found * page, needed * page);
        (found < needed)
            .then(|| format!("it has {found_bytes} bytes, expected {needed_bytes} at least"))
    }

    /// What it begins with.
    pub(super) fn first_page(&self, opener: &Opener<'_>) -> Result<[u8; 4096], MediumError> {
        let refuse = |blame, problem: String| MediumError::new(blame, problem);
        let raw = Raw::open(opener.regions, &opener.clock, &*self.opened.medium, &self.shape);
        let mut raw = raw.map_err(|problem| refuse(Blame::Machine, problem))?;
        let mut page = [0; 4096];
        raw.read(0, &mut page).map_err(|outcome| {
            refuse(Blame::Peer, format!("read its label: status {:#x}, expected 0", outcome.0))
        })?;
        Ok(page)
    }
}

impl Ground {
    /// One device, that is open.
    pub(super) fn first(device: &Uri, opened: Opened) -> Result<Self, MediumError> {
        let member = Member::of(device, opened)?;
        let (medium, shape) = (Arc::clone(&member.opened.medium), member.shape);
        Ok(Self { medium, shape, members: vec![member] })
    }

    /// Opens the others that a store has.
    pub(super) fn open_others(
        &mut self,
        opener: &Opener<'_>,
        place: &Place,
        store: &Store,
        is_read: bool,
    ) -> Result<(), MediumError> {
        let devices = store.devices();
        for (number, other) in (1..).zip(&devices.others) {
            let uri = place.device(number, other)?;
            let way = if is_read { uri.clone().to_read() } else { uri.clone() };
            let member = open_other(opener, store, &way, number, other).map_err(|error| {
                let text = format!("{}: device {number}, {uri}: {error}", place.store);
                let hint = format!(
                    "Bring it back, or say where it is: `tenmil store set '{}' --device {number}=URI`; \
                     `tenmil store rescue` copies what lies on the others.",
                    place.store
                );
                MediumError::new(error.blame(), text).with_hint(hint)
            })?;
            self.members.push(Member { uri, ..member });
        }
        self.join(devices);
        Ok(())
    }

    /// Opens of the others what can be had, to read. Returns what is wrong with the rest.
    pub(super) fn open_left(
        &mut self,
        opener: &Opener<'_>,
        place: &Place,
        store: &Store,
    ) -> Result<Vec<String>, MediumError> {
        let (devices, mut missing) = (store.devices(), Vec::new());
        let first = &self.members[0];
        missing.extend(first.lacks(devices, 0).map(|lacks| format!("{}: {lacks}", first.uri)));
        for (number, other) in (1..).zip(&devices.others) {
            let uri = place.device(number, other)?.to_read();
            let member = match open_labelled(opener, store, &uri, number, other) {
                Ok(member) => {
                    let lacks = member.lacks(devices, number);
                    missing.extend(lacks.map(|lacks| format!("device {number}, {uri}: {lacks}")));
                    member
                }
                Err(error) => {
                    missing.push(format!("device {number}, {uri}: {error}"));
                    Member::missing(&uri, &self.members[0])
                }
            };
            self.members.push(member);
        }
        Ok(missing)
    }

    /// Makes one of all that are there, as far as they reach. Returns the blocks of the store that they
    /// have.
    pub(super) fn join_left(&mut self, devices: &Devices) -> Vec<Range<u64>> {
        let members = &self.members;
        let absent: Arc<dyn Medium> = Arc::new(Absent(members[0].opened.medium.limits()));
        let (mut legs, mut present) = (Vec::new(), Vec::new());
        for (begin, run) in devices.runs() {
            let Some(member) = members.get(run.device as usize) else { continue };
            let has = if member.is_there { member.shape.pages.saturating_sub(run.at) } else { 0 };
            let has = has.min(run.blocks);
            if has > 0 {
                let medium = Arc::clone(&member.opened.medium);
                legs.push(Leg { medium, begin, at: run.at });
                present.push(begin..begin + has);
            }
            if has < run.blocks {
                legs.push(Leg { medium: Arc::clone(&absent), begin: begin + has, at: 0 });
            }
        }
        legs.push(Leg { medium: absent, begin: devices.blocks(), at: 0 });
        self.shape = joint_shape(members, devices.blocks());
        self.medium = Arc::new(Spanned::new(legs, devices.blocks()));
        present
    }

    /// Devices of which nobody knows but what their own labels say, to read.
    pub(super) fn of_labels(
        labelled: Vec<(Label, Member)>,
        first: Option<Member>,
    ) -> Option<(Self, Vec<Range<u64>>)> {
        let mut parts: Vec<(u64, Member)> = first.into_iter().map(|member| (0, member)).collect();
        parts.extend(labelled.into_iter().map(|(label, member)| (label.begin, member)));
        parts.sort_by_key(|(begin, _)| *begin);
        let absent = Arc::new(Absent(parts.first()?.1.opened.medium.limits()));
        let (mut legs, mut present, mut end): (Vec<Leg>, Vec<Range<u64>>, u64) = Default::default();
        for (begin, member) in &parts {
            if *begin > end {
                legs.push(Leg { medium: absent.clone(), begin: end, at: 0 });
            }
            let at = u64::from(*begin > 0);
            legs.push(Leg { medium: Arc::clone(&member.opened.medium), begin: *begin, at });
            end = begin + member.shape.pages.saturating_sub(at);
            present.push(*begin..end);
        }
        // A device that is longer than what was its part of the store ends where the next one begins.
        for index in 1..present.len() {
            present[index - 1].end = present[index - 1].end.min(present[index].start);
        }
        legs.push(Leg { medium: absent, begin: end, at: 0 });
        let medium = Arc::new(Spanned::new(legs, end));
        let members: Vec<Member> = parts.into_iter().map(|(_, member)| member).collect();
        let shape = joint_shape(&members, end);
        Some((Self { medium, shape, members }, present))
    }

    /// Makes one of all that are there, as the table says.
    pub(super) fn join(&mut self, devices: &Devices) {
        let members = &self.members;
        if devices.count() == 1 {
            let first = &members[0];
            (self.medium, self.shape) = (Arc::clone(&first.opened.medium), first.shape);
            return;
        }
        let leg = |(begin, run): (u64, volume::devices::Span)| {
            let member = members.get(run.device as usize)?;
            Some(Leg { medium: Arc::clone(&member.opened.medium), begin, at: run.at })
        };
        let legs = devices.runs().filter_map(leg).collect();
        self.shape = joint_shape(members, devices.blocks());
        self.medium = Arc::new(Spanned::new(legs, devices.blocks()));
    }

    /// What all of it is, in a line.
    pub(super) fn description(&self) -> String {
        let each: Vec<&str> =
            self.members.iter().map(|member| &*member.opened.description).collect();
        each.join("; and ")
    }

    /// What is told of each device.
    pub(super) fn infos(&self, devices: &Devices) -> Vec<DeviceInfo> {
        let info = |(number, member): (u32, &Member)| {
            let (uri, blocks) = (member.uri.to_string(), devices.gives(number));
            DeviceInfo { number, uri, blocks }
        };
        (0..).zip(&self.members).take(devices.count()).map(info).collect()
    }
}

/// How pages lie on all of them: in the first one's blocks, and as many at once as each takes.
fn joint_shape(members: &[Member], pages: u64) -> Shape {
    let least = members.iter().map(|member| member.shape.request_pages).min().unwrap_or(1);
    Shape { pages, request_pages: least, ..members[0].shape }
}

/// Opens a device of a store, and looks whether it is that, and all of it.
fn open_other(
    opener: &Opener<'_>,
    store: &Store,
    uri: &Uri,
    number: u32,
    other: &Other,
) -> Result<Member, MediumError> {
    let member = open_labelled(opener, store, uri, number, other)?;
    match member.lacks(store.devices(), number) {
        Some(lacks) => Err(MediumError::new(Blame::Caller, lacks)),
        None => Ok(member),
    }
}

/// Opens a device of a store, and looks whether it is that.
fn open_labelled(
    opener: &Opener<'_>,
    store: &Store,
    uri: &Uri,
    number: u32,
    other: &Other,
) -> Result<Member, MediumError> {
    let member = Member::of(uri, opener.open(uri)?)?;
    let page = member.first_page(opener)?;
    let expected = format!("expected device {number} of store `{}`", store.name());
    let refuse = |found: String| {
        MediumError::new(Blame::Caller, format!("{found}, {expected} ({:032x})", store.uuid()))
    };
    let label = Label::decode(&page).map_err(|flaw| refuse(begins_with(&page, &flaw)))?;
    if label.store != store.uuid() || label.number != number {
        return Err(refuse(label_said(&label)));
    }
    if label.uuid != other.uuid {
        let found = format!("its label is an old one, {:032x}", label.uuid);
        return Err(refuse(format!("{found}, where the store has {:032x}", other.uuid)));
    }
    Ok(member)
}

/// What a device is that has a label, in words.
pub(super) fn label_said(label: &Label) -> String {
    let Label { number, name, store, first_uri, .. } = label;
    format!(
        "it is device {number} of store `{name}` ({store:032x}), whose first device was {first_uri}"
    )
}

/// What a device is that has no label that can be read, in words.
fn begins_with(page: &[u8; 4096], flaw: &volume::Flaw) -> String {
    match decode_superblock(page, 0) {
        Ok((store, ..)) => format!("it is the first device of store {store:032x}"),
        Err(_) => format!("its label cannot be read: {flaw}"),
    }
}
