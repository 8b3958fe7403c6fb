//! The device that keeps every block on several others.
//!
//! ```text
//!   write ─┬─▶ leg 0     answered when all legs in sync have it
//!          └─▶ leg 1
//!   read ────▶ one of them
//! ```
//!
//! Each leg carries a [superblock] at its start. It says which legs are in sync, and in
//! which regions legs may differ because somebody was writing there.
//!
//! - A region is marked dirty on all legs before its first block is written, and clean again once
//!   nobody has written it for a while and everything is flushed. After a power cut only dirty
//!   regions are copied.
//! - When a leg fails, the others record durably that it is stale before any write is answered that
//!   it does not have. When it comes back it is told that it is stale, gets every write from then on,
//!   then a copy of every region written while it was away, and only then is it in sync.
//! - What two legs say is compared whenever a mirror is opened; legs that contradict each other are
//!   refused. A leg that may be ahead of all others must be there, unless the operator accepts that
//!   what it holds is lost; then all others record that it is stale before anything is served.
//!
//! - Whoever has it open is named in the superblocks, and looks whether it still is before it writes the next
//!   ones: see [fence].
//!
//! Writes of the same block that are under way at the same time may leave the legs different, one
//! write on each: whoever sends them has to send one after the other, as file systems do.

mod assemble;
pub(crate) mod bits;
mod channel;
mod claim;
mod commit;
mod copy;
mod events;
mod exclude;
pub(crate) mod fence;
mod make;
mod members;
mod meta;
mod options;
mod owner;
mod progress;
mod raw;
mod shared;
mod show;
pub mod superblock;
mod takeover;
mod tend;
mod work;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use base::{Backend, Durability, Instant, Limits, Medium, Operation, Support};
use dma::Regions;

use self::assemble::assemble;
use self::channel::MirrorChannel;
use self::claim::Claim;
pub use self::events::{MirrorCounters, MirrorEvent, MirrorNews, hear_of_mirrors};
use self::exclude::{Entry, Reserved, enter};
pub use self::fence::Ownership;
use self::make::check_leg;
pub use self::make::create;
pub use self::members::{Consent, add, remove, replace};
use self::meta::Meta;
pub use self::options::{InjectedBugs, MirrorOptions};
use self::owner::Owner;
pub use self::progress::{Health, LegProgress, LegState, MirrorHandle, Progress};
use self::raw::look;
use self::shared::{Shared, superblock_bytes};
use self::show::describe;
pub use self::show::{Report, share_of, show};
use self::superblock::Shape;
pub use self::takeover::take_over;
use crate::backend::exclusion::Exclusion;
use crate::backend::owned;
use crate::open::{Handle, Opened, Opener};
use crate::uri::Uri;
use crate::{Existing, MediumError};

/// Several devices that hold the same blocks.
pub struct Mirror {
    shared: Arc<Shared>,
    description: String,
    /// What the device of each leg is called.
    names: Arc<[Option<String>]>,
    /// What looks after it while nobody does I/O, if it was opened by its URI.
    owner: Option<Arc<Owner>>,
}

/// A device that is, or is to become, a leg.
#[derive(Clone)]
pub struct Leg {
    /// What it is called.
    pub name: String,
    /// The device, or why it cannot be had.
    pub medium: Result<Arc<dyn Medium>, String>,
}

/// The devices of a mirror that are open, and what is known of them.
#[derive(Default)]
struct OpenLegs {
    legs: Vec<Leg>,
    existing: Vec<Existing>,
    handles: Vec<Handle>,
    identities: Vec<(Uri, String)>,
}

/// Bytes that the background copies at once, as far as the legs take so many.
const CHUNK_BYTES: u32 = 256 << 10;
const DEPTH_MAX: u32 = 1024;
/// What a mirror can do if its legs can. What blocks read as after a deallocation, and what a copy
/// reads, would be up to each leg; legs have to be alike.
const OPERATIONS: [Operation; 7] = [
    Operation::Read,
    Operation::Write,
    Operation::Flush,
    Operation::Deallocate,
    Operation::WriteZeroes,
    Operation::Compare,
    Operation::Verify,
];

/// Opens `mirror:[URI],[URI]?resync=100m&degraded=no`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let options = parse(uri)?;
    let OpenLegs { legs, existing, handles, mut identities } = open_legs(opener, uri.children());
    let mut now = || opener.clock.now();
    let refuse = |problem| MediumError::from(uri.refuse(problem));
    let mut mirror = Mirror::open(opener.regions, &legs, &options, &mut now).map_err(refuse)?;
    let names = &mirror.names;
    mirror.owner = Owner::start(&mirror.shared, uri.to_string(), names, opener.clock)
        .map_err(refuse)?
        .map(Arc::new);
    let description = mirror.description.clone();
    let handle = mirror.handle();
    // The mirror is the same whichever of its legs are there.
    identities.extend(handle.progress().map(|progress| (uri.clone(), progress.uuid)));
    let handle = Handle::Mirror { uri: uri.to_string(), handle };
    let medium = Arc::new(mirror);
    Ok(Opened { medium, description, existing, handles, identities }.with(handle))
}

fn parse(uri: &Uri) -> Result<MirrorOptions, MediumError> {
    let mut fields = uri.fields();
    let default = MirrorOptions::default();
    let resync = fields.size("resync")?.unwrap_or(default.resync);
    let degraded = fields.choice("degraded", &[("yes", true), ("no", false)])?;
    fields.finish()?;
    if uri.children().is_empty() {
        return Err(uri.refuse("the legs are missing, expected mirror:[URI],[URI]").into());
    }
    if resync == 0 {
        return Err(uri.refuse("resync is 0 bytes per second, expected at least 1").into());
    }
    Ok(MirrorOptions { resync, degraded: degraded.unwrap_or(false), ..default })
}

/// Opens every leg that can be opened.
fn open_legs(opener: &Opener<'_>, uris: &[Uri]) -> OpenLegs {
    let mut open = OpenLegs::default();
    for uri in uris {
        let opened = opener.open(uri).map_err(|error| error.to_string());
        let medium = opened.map(|opened| {
            open.existing.extend(opened.existing);
            open.handles.extend(opened.handles);
            open.identities.extend(opened.identities);
            opened.medium
        });
        open.legs.push(Leg { name: uri.to_string(), medium });
    }
    open
}

impl Mirror {
    /// Opens a mirror over its legs, and records on each of them which ones it starts with. Requests
    /// name memory of `regions`, in which each channel takes a place; `now` reads the time while the
    /// superblocks are read and written.
    ///
    /// # Errors
    ///
    /// If these are not the legs of one mirror, contradict each other, none is in sync, or one is
    /// absent that may hold newer blocks and `options` do not accept that; or if somebody else has it open.
    pub fn open(
        regions: &Regions,
        legs: &[Leg],
        options: &MirrorOptions,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, String> {
        let opener = options.opener.map_or_else(owned::Opener::draw, owned::Opener::of);
        let reserved = Reserved::new(Exclusion::new(opener.owner().id));
        let exclusion = Arc::clone(&reserved.exclusion);
        let opened = Self::open_as(regions, legs, options, (opener, reserved), now);
        opened.inspect_err(|_| exclusion.release())
    }

    fn open_as(
        regions: &Regions,
        legs: &[Leg],
        options: &MirrorOptions,
        (opener, reserved): (owned::Opener, Reserved),
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, String> {
        let is_forced = options.force || options.bugs.ignores_fence;
        let entry = (options.opener, if is_forced { Entry::Force } else { Entry::Open });
        let (candidates, former) = enter((regions, legs), entry, &reserved.exclusion, now)?;
        let mut assembly = assemble(&candidates, options.start())?;
        let there = assembly.places.iter().flatten().map(|index| &legs[*index]);
        there.into_iter().try_for_each(|leg| check_leg(leg, &assembly.shape))?;
        let claim = Claim { regions, legs, is_forced: is_forced && former.is_some() };
        claim.claim(&mut assembly, opener.owner(), now)?;
        let description = describe(&assembly, &candidates);
        let media: Box<[Option<Arc<dyn Medium>>]> = assembly.places[..usize::from(assembly.legs)]
            .iter()
            .map(|place| place.and_then(|index| legs[index].medium.as_ref().ok().cloned()))
            .collect();
        let name = |place: &Option<usize>| place.map(|index| legs[index].name.clone());
        let names = assembly.places[..usize::from(assembly.legs)].iter().map(name).collect();
        let limits = limits_of(&media, &assembly.shape);
        let chunk_bytes = CHUNK_BYTES
            .min(limits.request_blocks_max * limits.block_size)
            .max(2 * superblock_bytes(limits.block_size));
        let chunk_blocks = (chunk_bytes / limits.block_size).min(limits.request_blocks_max);
        let meta = Meta::new(&assembly, options, chunk_blocks);
        let owner = (opener, reserved);
        let shared = Shared::new(media, regions.clone(), limits, chunk_bytes, (meta, owner));
        Ok(Self { shared: Arc::new(shared), description, names, owner: None })
    }

    /// Writes the superblocks of a new mirror onto these legs, for simulations: nobody is asked.
    ///
    /// # Errors
    ///
    /// If a leg is absent or too short.
    #[doc(hidden)]
    pub fn format(
        regions: &Regions,
        legs: &[Leg],
        uuid: u128,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, String> {
        make::format(regions, legs, uuid, now)
    }

    /// One line: which mirror, and which of its legs are in what state.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// What tells how far it is, for as long as it is open.
    pub fn handle(&self) -> MirrorHandle {
        MirrorHandle::new(&self.shared, Arc::clone(&self.names))
    }

    /// Legs that are in sync now, one bit each, and how many regions are still to be copied.
    pub fn progress(&self) -> (u8, u64) {
        let meta = self.shared.lock();
        (meta.in_sync, meta.todo.count())
    }
}

impl Medium for Mirror {
    fn limits(&self) -> Limits {
        self.shared.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let mut channel = MirrorChannel::open(&self.shared)?;
        channel.owner.clone_from(&self.owner);
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        let legs = self.shared.media.iter().flatten();
        let least = legs.map(|leg| leg.channels_max()).min().unwrap_or(u32::MAX);
        if self.owner.is_some() && least < u32::MAX { least - 1 } else { least }
    }

    fn extent(&self, lba: u64) -> Result<base::Extent, String> {
        let masks = self.shared.masks();
        let leg = self.shared.media.get(masks.source().trailing_zeros() as usize);
        let leg = leg.and_then(Option::as_ref).ok_or("no leg of the mirror is there")?;
        let shape = &self.shared.shape;
        let left = shape.block_count.saturating_sub(lba);
        let extent = leg.extent(lba + shape.first)?;
        Ok(base::Extent { blocks: extent.blocks.min(left), ..extent })
    }
}

/// The least of what the legs can do.
fn limits_of(media: &[Option<Arc<dyn Medium>>], shape: &Shape) -> Limits {
    let legs: Vec<Limits> = media.iter().flatten().map(|leg| leg.limits()).collect();
    let least = |of: fn(&Limits) -> u32| legs.iter().map(of).min().unwrap_or(0);
    let boundaries = legs.iter().map(|one| one.optimal_boundary_blocks);
    let boundary = boundaries.filter(|blocks| *blocks > 0).min().unwrap_or(0);
    let is_aligned = boundary > 0 && shape.first.is_multiple_of(boundary.into());
    let durability = legs.iter().map(|one| one.durability).reduce(Durability::weaker);
    let has = |operation: Operation| {
        let needed = match operation {
            Operation::Deallocate => Operation::WriteZeroes,
            other => other,
        };
        legs.iter().all(|one| one.support.has(needed))
    };
    let operations: Vec<Operation> = OPERATIONS.into_iter().filter(|one| has(*one)).collect();
    Limits {
        block_size: shape.block_size,
        metadata_size: 0,
        block_count: shape.block_count,
        request_blocks_max: least(|one| one.request_blocks_max),
        segments_max: legs.iter().map(|one| one.segments_max).min().unwrap_or(0),
        optimal_boundary_blocks: if is_aligned { boundary } else { 0 },
        atomic_write_blocks: least(|one| one.atomic_write_blocks),
        depth_max: least(|one| one.depth_max).min(DEPTH_MAX),
        durability: durability.unwrap_or(Durability::None),
        support: Support::of(&operations),
    }
}

impl std::fmt::Debug for Mirror {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Mirror").field(&self.description).finish()
    }
}
