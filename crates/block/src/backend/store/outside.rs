//! What lies below a volume outside its store: looked at when the volume is made, known again whenever
//! it is opened, and never written to.
//!
//! A parent is known by its size, the size of its blocks, checksums of some of them, and the number of the
//! snapshot if it is a volume of another store. Whoever changes it elsewhere, in blocks that are not among
//! those, is not found out.

use std::cell::Cell;

use base::{Blame, Extent, Limits, Operation};
use host::Clock;
use volume::format::URI_BYTES_MAX;
use volume::{Answer, Ask, Parent, VolumeInfo};

use super::raw::Raw;
use super::{OpenStore, PAGE_BYTES, Place, Shape};
use crate::MediumError;
use crate::open::{Opened, Opener};
use crate::uri::Uri;

/// A parent that is open.
pub(super) struct Outside {
    pub(super) uri: Uri,
    pub(super) opened: Opened,
    pub(super) shape: Shape,
    /// What it is known by, if it is a snapshot of another store; else zero.
    uuid: u128,
}

/// What a look at a parent has found.
#[derive(Clone, Debug)]
pub struct CheckedParent {
    /// What lies there.
    pub parent: Parent,
    /// Volumes and snapshots that are read from it.
    pub volumes: Vec<String>,
    /// Why it is not what it was, or could not be looked at.
    pub problem: Option<String>,
}

/// A store whose volumes have parents: they may be in any other.
#[derive(Clone, Copy)]
pub(super) struct Child<'a> {
    /// The device that the store is on.
    pub(super) device: &'a str,
    pub(super) uuid: u128,
}

/// Pages at either end that are looked at, and pages all over.
const END_PAGES: u64 = 16;
const SPREAD_PAGES: u64 = 32;
/// Parents that may stand on each other.
const STOREYS_MAX: u32 = 8;

thread_local! {
    /// How many parents are being opened, each for the one before.
    static STOREYS: Cell<u32> = const { Cell::new(0) };
}

impl OpenStore {
    /// What a volume is read from where nothing is mapped, as the store remembers it.
    ///
    /// # Errors
    ///
    /// If what says so is damaged.
    pub fn parent(&self, info: &VolumeInfo) -> Result<Option<Parent>, MediumError> {
        match self.ask(Ask::Parent { volume: info.id })? {
            Answer::Parent(parent) => Ok(parent),
            _ => Ok(None),
        }
    }

    /// Looks at what is to be the parent of a volume.
    ///
    /// # Errors
    ///
    /// If it cannot be had or read, is of this store, may be written to, or is no parent for a volume.
    pub fn look_at_parent(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Parent, MediumError> {
        let name = uri.to_string();
        if name.len() > URI_BYTES_MAX {
            let text = format!(
                "{name}: its name has {} bytes, expected {URI_BYTES_MAX} at most",
                name.len()
            );
            return Err(MediumError::new(Blame::Caller, text));
        }
        let outside = Outside::open(opener, self.as_child(), uri)?;
        let limits = outside.opened.medium.limits();
        let bytes = limits.block_count * u64::from(limits.block_size);
        let page = u64::from(PAGE_BYTES);
        if bytes == 0 || !bytes.is_multiple_of(page) {
            let text = format!("{name}: it has {bytes} bytes, expected a multiple of {page}");
            let hint = "Make it longer, by zeroes: `truncate -s %4k FILE`.";
            return Err(MediumError::new(Blame::Caller, text).with_hint(hint));
        }
        let blocks = bytes / page;
        let print = outside.print(opener, blocks)?;
        let (uuid, block_bytes) = (outside.uuid, limits.block_size);
        Ok(Parent { uri: name, blocks, block_bytes, uuid, print })
    }

    /// Opens the parent of a volume, if it has one, and looks whether it is the one it was.
    pub(super) fn open_parent(
        &self,
        opener: &Opener<'_>,
        info: &VolumeInfo,
    ) -> Result<Option<Outside>, MediumError> {
        let Some(parent) = self.parent(info)? else { return Ok(None) };
        let known = Outside::known(opener, self.as_child(), &parent);
        known.map(Some).map_err(|error| {
            let (volume, uri) = (&info.name, &parent.uri);
            let text = format!("{}: volume `{volume}`: its parent {uri}: {error}", self.name);
            MediumError::new(error.blame(), text).with_hint(
                "Bring back what was there; without it, what was written to the volume is all that there \
                 is, and `tenmil store rescue` copies that, or delete the volume. Others of the store \
                 open as ever.",
            )
        })
    }

    fn as_child(&self) -> Child<'_> {
        Child { device: &self.name, uuid: self.uuid() }
    }
}

impl Outside {
    /// Opens what is at `uri`, to read.
    fn open(opener: &Opener<'_>, child: Child<'_>, uri: &Uri) -> Result<Self, MediumError> {
        let storeys = STOREYS.get();
        if storeys >= STOREYS_MAX {
            let text = format!("{uri}: more than {STOREYS_MAX} parents upon each other");
            return Err(MediumError::new(Blame::Caller, text));
        }
        STOREYS.set(storeys + 1);
        let opened = refuse_own(opener, child, uri)
            .and_then(|uuid| Ok((uuid, opener.open(&uri.clone().to_read())?)));
        STOREYS.set(storeys);
        let (uuid, opened) = opened?;
        let shape = Shape::of(uri, &opened.medium.limits())?;
        Ok(Self { uri: uri.clone(), opened, shape, uuid })
    }

    /// Opens the one that is remembered, and looks whether it is that.
    pub(super) fn known(
        opener: &Opener<'_>,
        child: Child<'_>,
        parent: &Parent,
    ) -> Result<Self, MediumError> {
        let uri: Uri = parent.uri.parse()?;
        let outside = Self::open(opener, child, &uri)?;
        let other = |problem: String| MediumError::new(Blame::Peer, problem);
        let limits = outside.opened.medium.limits();
        let page = u64::from(PAGE_BYTES);
        if outside.shape.pages < parent.blocks {
            let found = limits.block_count * u64::from(limits.block_size);
            let expected = parent.blocks * page;
            return Err(other(format!("it has {found} bytes, expected {expected} at least")));
        }
        if limits.block_size != parent.block_bytes {
            let (found, expected) = (limits.block_size, parent.block_bytes);
            return Err(other(format!(
                "it is another: blocks of {found} bytes, expected {expected}"
            )));
        }
        if outside.uuid != parent.uuid {
            let (found, expected) = (outside.uuid, parent.uuid);
            let problem = format!("it is another snapshot: {found:032x}, expected {expected:032x}");
            return Err(other(problem));
        }
        let found = outside.print(opener, parent.blocks)?;
        if found != parent.print {
            let expected = parent.print;
            let problem = format!(
                "it is another, or was written to: the checksum of some of its blocks is {found:016x}, \
                 expected {expected:016x}"
            );
            return Err(other(problem));
        }
        Ok(outside)
    }

    /// Checksums of pages at both ends of so many (low half), and all over them (high half).
    fn print(&self, opener: &Opener<'_>, pages: u64) -> Result<u64, MediumError> {
        let last = pages.saturating_sub(END_PAGES).max(END_PAGES.min(pages));
        let ends: Vec<u64> = (0..END_PAGES.min(pages)).chain(last..pages).collect();
        let spread: Vec<u64> =
            (0..SPREAD_PAGES).map(|index| index * pages / SPREAD_PAGES).collect();
        let mut print = 0;
        for (set, shift) in [(ends, 0), (spread, 32)] {
            print |= u64::from(self.checksum(opener, &set)?) << shift;
        }
        Ok(print)
    }

    /// The checksum of the checksums of some pages.
    fn checksum(&self, opener: &Opener<'_>, pages: &[u64]) -> Result<u32, MediumError> {
        let machine =
            |problem: String| MediumError::new(Blame::Machine, format!("{}: {problem}", self.uri));
        let clock: &Clock = &opener.clock;
        let raw = Raw::open(opener.regions, clock, &*self.opened.medium, &self.shape);
        let (mut raw, mut all) = (raw.map_err(machine)?, [0; 4096]);
        for (at, place) in pages.iter().zip(all.chunks_exact_mut(4)) {
            let mut page = [0; 4096];
            raw.read(*at, &mut page).map_err(|outcome| {
                let problem =
                    format!("read block {at} of 4 KiB: status {:#x}, expected 0", outcome.0);
                MediumError::new(Blame::Peer, format!("{}: {problem}", self.uri))
            })?;
            place.copy_from_slice(&volume::checksum(&page).to_le_bytes());
        }
        Ok(volume::checksum(&all))
    }

    /// What a volume can do that is read from here.
    pub(super) fn limit(&self, own: Limits) -> Limits {
        let theirs = self.opened.medium.limits();
        let mut support = own.support;
        for operation in [Operation::Compare, Operation::Verify] {
            if !theirs.support.has(operation) {
                support = support.without(base::Support::of(&[operation]));
            }
        }
        Limits {
            request_blocks_max: own.request_blocks_max.min(self.shape.request_pages),
            segments_max: own.segments_max.min(theirs.segments_max),
            depth_max: own.depth_max.min(theirs.depth_max),
            support,
            ..own
        }
    }

    /// What some pages hold, from one on: so many at most.
    pub(super) fn extent(&self, page: u64, pages: u64) -> Result<Extent, String> {
        let per_page = self.shape.blocks_in_page;
        let Extent { blocks, holds } = self.opened.medium.extent(page * per_page)?;
        match blocks / per_page {
            // What changes within a page is read.
            0 => Ok(Extent { blocks: pages.min(1), holds: base::Holds::Data }),
            whole => Ok(Extent { blocks: whole.min(pages), holds }),
        }
    }
}

/// Refuses what stands on the store itself, or is a volume that may be written to. Returns the number of
/// the snapshot that it is, or zero.
fn refuse_own(opener: &Opener<'_>, child: Child<'_>, uri: &Uri) -> Result<u128, MediumError> {
    let refuse = |problem: &str, hint: String| {
        Err(MediumError::new(Blame::Caller, format!("{uri}: {problem}")).with_hint(hint))
    };
    if uri.to_string() == child.device {
        let hint = "Name a device that holds something else.".to_owned();
        return refuse("it is the device that the store itself is on", hint);
    }
    for below in uri.children() {
        if uri.scheme() != Place::SCHEME {
            refuse_own(opener, child, below)?;
        }
    }
    if uri.scheme() != Place::SCHEME {
        return Ok(0);
    }
    let place = Place::of(uri)?;
    let name = place.volume(uri)?;
    let is_named = place.store.to_string() == child.device;
    let hint =
        || format!("Make the clone from the volume itself: `tenmil volume clone '{uri}' NAME`.");
    if is_named {
        return refuse("it is a volume of the same store", hint());
    }
    let open = OpenStore::open(opener, &place)?;
    if open.uuid() == child.uuid {
        return refuse("it is a volume of the same store", hint());
    }
    let info = open.find(name)?;
    if !info.is_read_only {
        let hint =
            format!("Make a snapshot of it, and name that: `tenmil volume snapshot '{uri}' NAME`.");
        return refuse("it is a volume that may be written to, expected a snapshot", hint);
    }
    Ok(info.uuid)
}

/// Looks at the parents of volumes, each once.
pub(super) fn look_at_all(
    opener: &Opener<'_>,
    child: Child<'_>,
    found: impl Iterator<Item = (String, Parent)>,
) -> Vec<CheckedParent> {
    let mut all: Vec<CheckedParent> = Vec::new();
    for (volume, parent) in found {
        match all.iter_mut().find(|one| one.parent == parent) {
            Some(one) => one.volumes.push(volume),
            None => {
                let known = Outside::known(opener, child, &parent);
                let problem = known.err().map(|error| error.to_string());
                all.push(CheckedParent { parent, volumes: vec![volume], problem });
            }
        }
    }
    all
}
