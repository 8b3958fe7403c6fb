//! External parent images of volumes: fingerprinted when the volume is created, verified whenever it is
//! opened, and never written.
//!
//! A parent is identified by its size, its block size, checksums of some blocks, and the UUID of the
//! snapshot if it is a volume of another pool. Changes in other blocks are not detected.

use std::cell::Cell;

use tenmil_base::{BlockExtent, ErrorCategory, Limits, Operation};
use tenmil_linux::Clock;
use tenmil_volume::format::URI_BYTES_MAX;
use tenmil_volume::{ParentInfo, PoolRequest, PoolResponse, VolumeInfo};

use super::page_io::BlockingPageIo;
use super::{OpenPool, PAGE_BYTES, PageGeometry, VolumeRef};
use tenmil_base::Error;
use tenmil_base::text::quote_shell_word;
use tenmil_block::uri::{Uri, short_form_for_terminal};
use tenmil_block::{OpenedDevice, Opener};

/// An open parent.
pub(super) struct ParentImage {
    pub(super) uri: Uri,
    pub(super) opened: OpenedDevice,
    pub(super) geometry: PageGeometry,
    /// UUID of the snapshot, if it is one of another pool; else zero.
    uuid: u128,
}

/// Result of checking a parent.
#[derive(Clone, Debug)]
pub struct ParentCheckResult {
    /// The parent as recorded.
    pub parent: ParentInfo,
    /// Volumes and snapshots that are read from it.
    pub volumes: Vec<String>,
    /// Why it has changed, or could not be checked.
    pub problem: Option<String>,
}

/// A pool whose volumes have parents, which must not be in the same pool.
#[derive(Clone, Copy)]
pub(super) struct ChildPool<'a> {
    /// Device of the pool.
    pub(super) device: &'a str,
    pub(super) uuid: u128,
}

/// Number of fingerprinted pages at each end, and of pages spread over the image.
const END_PAGES: u64 = 16;
const SPREAD_PAGES: u64 = 32;
/// Maximum depth of nested parents.
const DEPTH_MAX: u32 = 8;

thread_local! {
    /// Current depth of nested parents being opened.
    static DEPTHS: Cell<u32> = const { Cell::new(0) };
}

impl OpenPool {
    /// The recorded parent of a volume.
    ///
    /// # Errors
    ///
    /// If the record is damaged.
    pub fn parent(&self, info: &VolumeInfo) -> Result<Option<ParentInfo>, Error> {
        match self.request_and_wait(PoolRequest::Parent { volume: info.id })? {
            PoolResponse::Parent(parent) => Ok(parent),
            _ => Ok(None),
        }
    }

    /// Opens and fingerprints the future parent of a volume.
    ///
    /// # Errors
    ///
    /// If it cannot be opened or read, is in this pool, is writable, or is not a valid parent.
    pub fn open_and_fingerprint_parent(
        &self,
        opener: &Opener<'_>,
        uri: &Uri,
    ) -> Result<ParentInfo, Error> {
        let name = uri.to_string();
        if name.len() > URI_BYTES_MAX {
            let text = format!(
                "{uri:#}: its name has {} bytes, expected {URI_BYTES_MAX} at most",
                name.len()
            );
            return Err(Error::new(ErrorCategory::Usage, text));
        }
        let outside = ParentImage::open(opener, self.as_child_pool(), uri)?;
        let limits = outside.opened.medium.limits();
        let bytes = limits.block_count * u64::from(limits.block_size);
        let page = u64::from(PAGE_BYTES);
        if bytes == 0 || !bytes.is_multiple_of(page) {
            let text = format!("{uri:#}: it has {bytes} bytes, expected a multiple of {page}");
            let hint = "Make it longer, by zeroes: `truncate -s %4k FILE`.";
            return Err(Error::new(ErrorCategory::Usage, text).with_hint(hint));
        }
        let blocks = bytes / page;
        let print = outside.content_fingerprint(opener, blocks)?;
        let (uuid, block_bytes) = (outside.uuid, limits.block_size);
        Ok(ParentInfo { uri: name, blocks, block_bytes, uuid, print })
    }

    /// Opens the parent of a volume, if it has one, and verifies that it is unchanged.
    pub(super) fn open_parent(
        &self,
        opener: &Opener<'_>,
        info: &VolumeInfo,
    ) -> Result<Option<ParentImage>, Error> {
        let Some(parent) = self.parent(info)? else { return Ok(None) };
        let known = ParentImage::open_recorded(opener, self.as_child_pool(), &parent);
        known.map(Some).map_err(|error| {
            let (volume, uri) = (&info.name, short_form_for_terminal(&parent.uri));
            let text = format!("{}: volume `{volume}`: its parent {uri}: {error}", self.name);
            Error::new(error.category(), text).with_hint(
                "Bring back what was there; without it, what was written to the volume is all that there \
                 is, and `tenmil pool rescue` copies that, or delete the volume. Others of the pool \
                 open as ever.",
            )
        })
    }

    fn as_child_pool(&self) -> ChildPool<'_> {
        ChildPool { device: &self.device, uuid: self.uuid() }
    }
}

impl ParentImage {
    /// Opens an image read-only.
    fn open(opener: &Opener<'_>, child: ChildPool<'_>, uri: &Uri) -> Result<Self, Error> {
        let depths = DEPTHS.get();
        if depths >= DEPTH_MAX {
            let text = format!("{uri:#}: more than {DEPTH_MAX} parents upon each other");
            return Err(Error::new(ErrorCategory::Usage, text));
        }
        DEPTHS.set(depths + 1);
        let opened = check_is_outside_pool(opener, child, uri)
            .and_then(|uuid| Ok((uuid, opener.open(&uri.clone().read_only())?)));
        DEPTHS.set(depths);
        let (uuid, opened) = opened?;
        let geometry = PageGeometry::from_limits(uri, &opened.medium.limits())?;
        Ok(Self { uri: uri.clone(), opened, geometry, uuid })
    }

    /// Opens the recorded image, and verifies it.
    pub(super) fn open_recorded(
        opener: &Opener<'_>,
        child: ChildPool<'_>,
        parent: &ParentInfo,
    ) -> Result<Self, Error> {
        let uri: Uri = parent.uri.parse()?;
        let outside = Self::open(opener, child, &uri)?;
        let other = |problem: Error| Error::new(ErrorCategory::Remote, problem);
        let limits = outside.opened.medium.limits();
        let page = u64::from(PAGE_BYTES);
        if outside.geometry.pages < parent.blocks {
            let found = limits.block_count * u64::from(limits.block_size);
            let expected = parent.blocks * page;
            return Err(other(Error::environment(format!(
                "it has {found} bytes, expected {expected} at least"
            ))));
        }
        if limits.block_size != parent.block_bytes {
            let (found, expected) = (limits.block_size, parent.block_bytes);
            return Err(other(Error::environment(format!(
                "it is another: blocks of {found} bytes, expected {expected}"
            ))));
        }
        if outside.uuid != parent.uuid {
            let (found, expected) = (outside.uuid, parent.uuid);
            let problem = format!("it is another snapshot: {found:032x}, expected {expected:032x}");
            return Err(other(Error::environment(problem)));
        }
        let found = outside.content_fingerprint(opener, parent.blocks)?;
        if found != parent.print {
            let expected = parent.print;
            let problem = format!(
                "it is another, or was written to: the checksum of some of its blocks is {found:016x}, \
                 expected {expected:016x}"
            );
            return Err(other(Error::environment(problem)));
        }
        Ok(outside)
    }

    /// Checksums of pages at both ends (low half), and of pages spread over the image (high half).
    fn content_fingerprint(&self, opener: &Opener<'_>, pages: u64) -> Result<u64, Error> {
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
    fn checksum(&self, opener: &Opener<'_>, pages: &[u64]) -> Result<u32, Error> {
        let machine = |problem: Error| {
            Error::new(ErrorCategory::Environment, format!("{}: {problem}", self.uri))
        };
        let clock: &Clock = &opener.clock;
        let raw = BlockingPageIo::open(opener.regions, clock, &*self.opened.medium, &self.geometry);
        let (mut raw, mut all) = (raw.map_err(machine)?, [0; 4096]);
        for (at, place) in pages.iter().zip(all.chunks_exact_mut(4)) {
            let mut page = [0; 4096];
            raw.read(*at, &mut page).map_err(|status| {
                let problem = format!("read block {at} of 4 KiB: {status}, expected success");
                Error::new(ErrorCategory::Remote, format!("{}: {problem}", self.uri))
            })?;
            place.copy_from_slice(&tenmil_volume::block_checksum(&page).to_le_bytes());
        }
        Ok(tenmil_volume::block_checksum(&all))
    }

    /// The limits of a volume with this parent.
    pub(super) fn volume_limits(&self, own: Limits) -> Limits {
        let theirs = self.opened.medium.limits();
        let mut support = own.operations;
        for operation in [Operation::Compare, Operation::Verify] {
            if !theirs.operations.has(operation) {
                support = support.without(tenmil_base::OperationSet::from_operations(&[operation]));
            }
        }
        Limits {
            request_blocks_max: own.request_blocks_max.min(self.geometry.request_pages),
            segments_max: own.segments_max.min(theirs.segments_max),
            depth_max: own.depth_max.min(theirs.depth_max),
            operations: support,
            ..own
        }
    }

    /// The block status of at most `pages` pages from `page` on.
    pub(super) fn extent(&self, page: u64, pages: u64) -> Result<BlockExtent, Error> {
        let per_page = self.geometry.blocks_in_page;
        let BlockExtent { blocks, kind: holds } =
            self.opened.medium.block_status(page * per_page)?;
        match blocks / per_page {
            // A page with mixed status counts as data.
            0 => Ok(BlockExtent { blocks: pages.min(1), kind: tenmil_base::ExtentKind::Data }),
            whole => Ok(BlockExtent { blocks: whole.min(pages), kind: holds }),
        }
    }
}

/// Rejects an image on the pool itself, and a writable volume. Returns the UUID of the snapshot, or zero.
fn check_is_outside_pool(
    opener: &Opener<'_>,
    child: ChildPool<'_>,
    uri: &Uri,
) -> Result<u128, Error> {
    let refuse = |problem: &str, hint: String| {
        Err(Error::new(ErrorCategory::Usage, format!("{uri:#}: {problem}")).with_hint(hint))
    };
    if uri.to_string() == child.device {
        let hint = "Name a device that holds something else.".to_owned();
        return refuse("it is the device that the pool itself is on", hint);
    }
    for below in uri.children() {
        if uri.scheme() != VolumeRef::SCHEME {
            check_is_outside_pool(opener, child, below)?;
        }
    }
    if uri.scheme() != VolumeRef::SCHEME {
        return Ok(0);
    }
    let place = VolumeRef::parse(uri)?;
    let name = place.volume_name(uri)?;
    let is_named = place.store.to_string() == child.device;
    let word = || quote_shell_word(&format!("{uri:#}"));
    let hint =
        || format!("Make the clone from the volume itself: `tenmil volume clone {} NAME`.", word());
    if is_named {
        return refuse("it is a volume of the same pool", hint());
    }
    let open = OpenPool::open(opener, &place)?;
    if open.uuid() == child.uuid {
        return refuse("it is a volume of the same pool", hint());
    }
    let info = open.find_volume(name)?;
    if !info.is_read_only {
        let hint = format!(
            "Make a snapshot of it, and name that: `tenmil volume snapshot {} NAME`.",
            word()
        );
        return refuse("it is a volume that may be written to, expected a snapshot", hint);
    }
    Ok(info.uuid)
}

/// Checks the parents of volumes, each once.
pub(super) fn check_parents(
    opener: &Opener<'_>,
    child: ChildPool<'_>,
    found: impl Iterator<Item = (String, ParentInfo)>,
) -> Vec<ParentCheckResult> {
    let mut all: Vec<ParentCheckResult> = Vec::new();
    for (volume, parent) in found {
        match all.iter_mut().find(|one| one.parent == parent) {
            Some(one) => one.volumes.push(volume),
            None => {
                let known = ParentImage::open_recorded(opener, child, &parent);
                let problem = known.err().map(|error| error.to_string());
                all.push(ParentCheckResult { parent, volumes: vec![volume], problem });
            }
        }
    }
    all
}
