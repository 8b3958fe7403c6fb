//! Making a store, opening one, and looking whether one is whole.

use base::{Blame, Medium, Outcome};
use host::machine::Machine;
use volume::devices::LABEL_BLOCKS;
use volume::format::STORE_BLOCKS_MIN;
use volume::{NewStore, Opened as OpenedStore, Opening, Owner, Step, Store, StoreError};

use super::check::{Checked, Walk};
use super::ground::{Ground, Member};
use super::grow::Grown;
use super::outside::{self, Child};
use super::raw::Raw;
use super::{OpenStore, Place, Shape, refusal};
use crate::backend::owned;
use crate::open::Opener;
use crate::uri::Uri;
use crate::{Existing, MediumError, guard};

/// What has come of making a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    /// Blocks of 4 KiB in it.
    pub blocks: u64,
    /// Whether it was there already, of this name and as large as its device; nothing was written.
    pub was_there: bool,
}

/// Makes a store on a device, unless it is there.
///
/// # Errors
///
/// If the device cannot be had or is too small, or there is something else on it and `overwrite` is
/// not set.
pub fn create(
    opener: &Opener<'_>,
    uri: &Uri,
    name: &str,
    overwrite: bool,
) -> Result<Created, MediumError> {
    create_over(opener, (uri, &[]), name, overwrite)
}

/// Makes a store on one device or several, unless it is there.
///
/// # Errors
///
/// As [`create`] and [`OpenStore::grow`]; nothing is written if one of the devices is refused.
pub fn create_over(
    opener: &Opener<'_>,
    (uri, others): (&Uri, &[Uri]),
    name: &str,
    overwrite: bool,
) -> Result<Created, MediumError> {
    let below = opener.open(uri)?;
    let shape = Shape::of(uri, &below.medium.limits())?;
    let steps = steps(uri, name, &shape)?;
    let there = look(opener, &Place::on(uri), &*below.medium, &shape, None);
    if let Some(owner) = there.as_ref().ok().and_then(|there| there.store.owner())
        && overwrite
        && !owned::is_gone(&owner)
    {
        return Err(refusal(&uri.to_string(), &StoreError::Owned { by: Box::new(owner) }));
    }
    let is_there = !overwrite && there.is_ok_and(|there| is_it(&there.store, name, &shape, others));
    if !is_there {
        let mut existing = below.existing.clone();
        for other in others {
            existing.extend(look_at_other(opener, other)?);
        }
        guard::allow("store create", &existing, overwrite, &Machine::this())?;
        make_files()?;
        format(opener, uri, &*below.medium, &shape, steps)?;
    }
    drop(below);
    if others.is_empty() {
        return Ok(Created { blocks: shape.pages, was_there: is_there });
    }
    // They have been looked at, and some may have been made just now.
    let grown = grow(opener, &Place::on(uri), others, !is_there)?;
    let was_there = is_there && grown.before == grown.blocks;
    Ok(Created { blocks: grown.blocks, was_there })
}

/// Makes the files that were opened and are not there yet: nothing is refused any more.
pub(super) fn make_files() -> Result<(), MediumError> {
    host::file::keep().map_err(|error| MediumError::new(error.blame(), error.to_string()))
}

/// Whether a store is the one that is to be made, or one from which it was begun.
fn is_it(store: &Store, name: &str, shape: &Shape, others: &[Uri]) -> bool {
    let devices = store.devices();
    store.name() == name && devices.first == shape.pages && devices.count() <= 1 + others.len()
}

/// Looks whether a device can be one more, and what is on it.
fn look_at_other(opener: &Opener<'_>, uri: &Uri) -> Result<Vec<Existing>, MediumError> {
    let member = Member::of(uri, opener.open(uri)?)?;
    let (blocks, needed) = (member.shape.pages, STORE_BLOCKS_MIN + LABEL_BLOCKS);
    if blocks < needed {
        let error = StoreError::DeviceTooSmall { blocks, needed };
        return Err(refusal(&uri.to_string(), &error));
    }
    Ok(member.opened.existing)
}

/// What has to be written to make a store.
pub(super) fn steps(uri: &Uri, name: &str, shape: &Shape) -> Result<Vec<Step>, MediumError> {
    let uuid = u128::from(host::random_seed()) << 64 | u128::from(host::random_seed());
    let new = NewStore { name: name.into(), uuid, blocks: shape.pages };
    new.steps().map_err(|error| refusal(&uri.to_string(), &error))
}

/// Writes that.
pub(super) fn format(
    opener: &Opener<'_>,
    uri: &Uri,
    medium: &dyn Medium,
    shape: &Shape,
    steps: Vec<Step>,
) -> Result<(), MediumError> {
    let refuse = |problem: String| MediumError::new(Blame::Peer, format!("{uri}: {problem}"));
    let mut raw = Raw::open(opener.regions, &opener.clock, medium, shape)
        .map_err(|problem| MediumError::new(Blame::Machine, format!("{uri}: {problem}")))?;
    for step in steps {
        let done = match &step {
            Step::Write { at, bytes } => raw.write(*at, bytes),
            Step::Flush => raw.flush(),
        };
        done.map_err(|outcome| {
            refuse(format!("write a superblock: status {:#x}, expected 0", outcome.0))
        })?;
    }
    Ok(())
}

/// Opens a store, and makes it grow: see [`OpenStore::grow`].
///
/// # Errors
///
/// If there is no store that can be opened, and as for that.
pub fn grow(
    opener: &Opener<'_>,
    place: &Place,
    added: &[Uri],
    overwrite: bool,
) -> Result<Grown, MediumError> {
    OpenStore::open(opener, place)?.grow(opener, added, overwrite)
}

/// Takes a store from whoever has it open for writing, durably, so that anybody may open it: only from an owner
/// that is known to be gone, or that the devices exclude from writing, unless [`Place::force`] is set. Returns
/// the former owner.
///
/// # Errors
///
/// Who has it open and may still be there; or if there is no store that can be opened.
pub fn take_over(opener: &Opener<'_>, place: &Place) -> Result<Option<String>, MediumError> {
    let place = Place { takes_over: true, ..place.clone() };
    let open = OpenStore::open(opener, &place)?;
    let former = open.shared.lock().store.owner().map(|owner| owner.to_string());
    open.claim()?;
    Ok(former)
}

/// Looks at all metadata of a store. Nothing is written.
///
/// # Errors
///
/// If there is no store that can be opened.
pub fn check(opener: &Opener<'_>, place: &Place) -> Result<Checked, MediumError> {
    let device = place.store.clone().to_read();
    let mut ground = Ground::first(&place.store, opener.open(&device)?)?;
    let opened = look(opener, place, &*ground.medium, &ground.shape, None)?;
    let OpenedStore { mut store, damaged } = opened;
    ground.open_others(opener, place, &store, true)?;
    let mut raw = Raw::open(opener.regions, &opener.clock, &*ground.medium, &ground.shape)
        .map_err(|problem| MediumError::new(Blame::Machine, format!("{device}: {problem}")))?;
    let mut walk = Walk { pages: &mut raw, store: &mut store };
    let (report, found) = walk.whole(&mut |_| Ok(()))?;
    let name = place.store.to_string();
    let child = Child { device: &name, uuid: store.uuid() };
    let parents = outside::look_at_all(opener, child, found.into_iter());
    Ok(Checked {
        name: store.name(),
        uuid: store.uuid(),
        generation: store.generation(),
        devices: ground.infos(store.devices()),
        damaged: damaged.iter().map(ToString::to_string).collect(),
        report,
        parents,
    })
}

/// Opens what lies there.
pub(super) fn look(
    opener: &Opener<'_>,
    place: &Place,
    medium: &dyn Medium,
    shape: &Shape,
    me: Option<Owner>,
) -> Result<OpenedStore, MediumError> {
    let name = place.store.to_string();
    let mut raw = Raw::open(opener.regions, &opener.clock, medium, shape)
        .map_err(|problem| MediumError::new(Blame::Machine, format!("{name}: {problem}")))?;
    let mut opening = Opening::new(shape.pages, place.cache_bytes).with_bugs(place.bugs);
    if let Some(me) = me {
        opening = opening.to_write(me);
    }
    while let Some(at) = opening.next_read() {
        read_into(&mut raw, at, |bytes| opening.handle_read(bytes));
    }
    opening.finish().map_err(|error| {
        let error = match error {
            StoreError::NoStore(_) if shape.pages < STORE_BLOCKS_MIN => {
                let needed = STORE_BLOCKS_MIN;
                StoreError::DeviceTooSmall { blocks: shape.pages, needed }
            }
            error => error,
        };
        refusal(&name, &error)
    })
}

pub(super) fn read_into(
    raw: &mut Raw<'_>,
    at: u64,
    take: impl FnOnce(Result<&[u8; 4096], Outcome>),
) {
    let mut page = [0; 4096];
    let read = raw.read(at, &mut page);
    take(read.map(|()| &page));
}
