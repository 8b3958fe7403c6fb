//! Check of all metadata of a pool, offline or while it is served by this process.
//!
//! The metadata of a served pool changes all the time, but never in place: pages reachable from a durable
//! superblock stay until a later one is durable. A check pins that state. Space that the pool frees
//! meanwhile is not reused, and writers do not wait. If the pin holds the last free space, the check ends
//! with an error and releases it.

use tenmil_base::ErrorCategory;
use tenmil_volume::format::{BlockKind, decode_superblock};
use tenmil_volume::{
    ActionResult, CheckFinding, CheckReport, ConsistencyCheck, Corruption, CorruptionKind,
    CountedUsage, DeviceAction, ParentInfo, Pool, PoolRequest, PoolResponse, SpaceUsage,
};

use super::create_pool::read_page_for;
use super::page_io::{BlockingPageIo, GrowablePoolPageIo};
use super::parent_image::{self, ChildPool, ParentCheckResult};
use super::pool_devices::DeviceInfo;
use super::scrub::{BACKGROUND_BLOCKS, STREAM_WAIT_MAX};
use super::send_stream::ProgressFn;
use super::{OpenPool, PAGE_BYTES};
use tenmil_base::Error;
use tenmil_block::Opener;

/// Result of a check of a whole pool.
#[derive(Clone, Debug)]
pub struct PoolCheckResult {
    /// Name of the pool.
    pub name: String,
    /// UUID of the pool.
    pub uuid: u128,
    /// The checked transaction.
    pub generation: u64,
    /// Devices of the pool.
    pub devices: Vec<DeviceInfo>,
    /// Superblock copies that cannot be read, with their problems.
    pub damaged: Vec<String>,
    /// All other findings, and the amount of metadata checked.
    pub report: CheckReport,
    /// External parents of volumes, and whether they could be checked. An unavailable parent is not a
    /// fault of the pool.
    pub parents: Vec<ParentCheckResult>,
}

/// Iterates over a pool that does not change.
pub(super) struct ReadOnlyWalker<'a, P> {
    pub(super) pages: &'a mut P,
    pub(super) store: &'a mut Pool,
}

/// Source of metadata pages.
pub(super) trait PageSource {
    /// Calls `take` with a page, or with the status of its read error.
    fn read_page_for(
        &mut self,
        at: u64,
        take: impl FnOnce(Result<&[u8; 4096], tenmil_base::IoStatus>),
    );
}

/// The last durable state of an open pool, pinned for reading.
struct PinnedMetadata<'a> {
    open: &'a OpenPool,
    store: Pool,
}

/// Maximum number of attempts to read superblocks that are not being overwritten.
const POLLS_MAX: u32 = 8;

impl OpenPool {
    /// Checks all metadata reachable from the last durable superblock, while the pool is in use.
    ///
    /// # Errors
    ///
    /// If memory is exhausted, the pool needs the pinned space, or `watch` returns false.
    pub fn check(
        &self,
        opener: &Opener<'_>,
        watch: &mut ProgressFn<'_>,
    ) -> Result<PoolCheckResult, Error> {
        let machine = |problem: Error| {
            Error::new(ErrorCategory::Environment, format!("{}: check: {problem}", self.name))
        };
        let mut pages = GrowablePoolPageIo::open(self, 1).map_err(machine)?;
        let damaged = self.check_superblocks(&mut pages);
        let mut still = PinnedMetadata::pin(self);
        let mut read = 0;
        let (report, found) = ReadOnlyWalker { pages: &mut pages, store: &mut still.store }
            .check_pool(&mut |left| {
                read += 1;
                if read % u64::from(BACKGROUND_BLOCKS) == 0 {
                    self.wait_for_foreground_idle(STREAM_WAIT_MAX);
                }
                self.check_pin_leaves_space()?;
                let bytes = |pages: u64| pages * u64::from(PAGE_BYTES);
                match watch((bytes(read), bytes(read + left))) {
                    true => Ok(()),
                    false => Err(machine(Error::environment("it was interrupted"))),
                }
            })?;
        let (name, uuid, generation) =
            (still.store.name(), still.store.uuid(), still.store.generation());
        let devices = self.lock_pool_devices().infos(still.store.devices());
        drop(still);
        let child = ChildPool { device: &self.device, uuid };
        let parents = parent_image::check_parents(opener, child, found.into_iter());
        let damaged = damaged.iter().map(ToString::to_string).collect();
        Ok(PoolCheckResult { name, uuid, generation, devices, damaged, report, parents })
    }

    /// Fails if the pinned space is the last free space.
    fn check_pin_leaves_space(&self) -> Result<(), Error> {
        if !self.shared.lock().store.is_space_short_by_pin() {
            return Ok(());
        }
        let text = format!(
            "{}: check: the pool has no free space besides the blocks that the check pins, expected more",
            self.name
        );
        let hint = "Delete volumes or grow the pool, or check it while less is written; the pinned \
                    blocks are freed.";
        Err(Error::new(ErrorCategory::Environment, text).with_hint(hint))
    }

    /// Reads both copies of the last durable superblock. Copies that are overwritten meanwhile are
    /// skipped; a pool that commits all the time may have none to read.
    fn check_superblocks(&self, pages: &mut GrowablePoolPageIo<'_>) -> Vec<Corruption> {
        for _ in 0..POLLS_MAX {
            let (uuid, generation, places) = {
                let store = &self.shared.lock().store;
                (store.uuid(), store.generation(), store.superblock_addresses())
            };
            let mut damaged = Vec::new();
            for address in places {
                pages.read_page_for(address, |bytes| {
                    let found = bytes
                        .map_err(CorruptionKind::ReadError)
                        .and_then(|bytes| decode_superblock(bytes, address));
                    let flaw = match found {
                        Ok((found, at, ..)) if (found, at) == (uuid, generation) => None,
                        Ok((_, found, ..)) => {
                            Some(CorruptionKind::Generation { found, expected: generation })
                        }
                        Err(flaw) => Some(flaw),
                    };
                    let kind = Some(BlockKind::Superblock);
                    damaged.extend(flaw.map(|flaw| Corruption { address, kind, owner: 0, flaw }));
                });
            }
            // The next superblock goes to other locations; only the one after it returns to these.
            if damaged.is_empty() || self.generation() == generation {
                return damaged;
            }
        }
        Vec::new()
    }
}

impl<'a> PinnedMetadata<'a> {
    fn pin(open: &'a OpenPool) -> Self {
        let store = open.shared.lock().store.pinned_read_only_pool();
        Self { open, store }
    }
}

impl Drop for PinnedMetadata<'_> {
    fn drop(&mut self) {
        self.open.shared.lock_to_submit().store.unpin_metadata(self.store.generation());
    }
}

impl PageSource for BlockingPageIo<'_> {
    fn read_page_for(
        &mut self,
        at: u64,
        take: impl FnOnce(Result<&[u8; 4096], tenmil_base::IoStatus>),
    ) {
        read_page_for(self, at, take);
    }
}

impl PageSource for GrowablePoolPageIo<'_> {
    fn read_page_for(
        &mut self,
        at: u64,
        take: impl FnOnce(Result<&[u8; 4096], tenmil_base::IoStatus>),
    ) {
        match self.page_io_up_to(at + 1) {
            Ok(raw) => read_page_for(raw, at, take),
            Err(status) => take(Err(status)),
        }
    }
}

impl<P: PageSource> ReadOnlyWalker<'_, P> {
    /// Checks all metadata, and compares the recorded space usage of each volume with the counted one.
    /// `continues` is called before each page with the number of known pages left, and may end the check.
    /// Returns the findings, and the volumes with parents.
    pub(super) fn check_pool(
        &mut self,
        continues: &mut dyn FnMut(u64) -> Result<(), Error>,
    ) -> Result<(CheckReport, Vec<(String, ParentInfo)>), Error> {
        let mut check = ConsistencyCheck::of_pool(self.store);
        while let Some(at) = check.next_read() {
            continues(check.unread_blocks() as u64)?;
            self.pages.read_page_for(at, |bytes| check.handle_read(bytes));
        }
        let mut report = check.into_report();
        for counted in &report.accounts {
            let reported = self.recorded_usage(&counted.name, continues)?;
            report.findings.extend(compare_usage(counted, reported));
        }
        Ok((report, self.volume_parents(continues)?))
    }

    /// The recorded space usage of a volume.
    fn recorded_usage(
        &mut self,
        name: &str,
        continues: &mut dyn FnMut(u64) -> Result<(), Error>,
    ) -> Result<Option<SpaceUsage>, Error> {
        Ok(match self.run_request(PoolRequest::SpaceUsage(name.into()), continues)? {
            Some(PoolResponse::Account(account)) => Some(account),
            _ => None,
        })
    }

    /// Volumes that have parents.
    fn volume_parents(
        &mut self,
        continues: &mut dyn FnMut(u64) -> Result<(), Error>,
    ) -> Result<Vec<(String, ParentInfo)>, Error> {
        let Some(PoolResponse::Volumes(volumes)) =
            self.run_request(PoolRequest::List, continues)?
        else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for info in volumes.into_iter().filter(|info| info.reach > 0) {
            if let Some(PoolResponse::Parent(Some(parent))) =
                self.run_request(PoolRequest::Parent { volume: info.id }, continues)?
            {
                found.push((info.name, parent));
            }
        }
        Ok(found)
    }

    /// Executes a pool request read-only: writes that the pool requests are not performed.
    fn run_request(
        &mut self,
        ask: PoolRequest,
        continues: &mut dyn FnMut(u64) -> Result<(), Error>,
    ) -> Result<Option<PoolResponse>, Error> {
        self.store.submit(0, ask);
        while let Some(action) = self.store.next_action() {
            if let DeviceAction::ReadPage { io, at } = action {
                continues(0)?;
                let store = &mut *self.store;
                self.pages.read_page_for(at, |bytes| match bytes {
                    Ok(bytes) => store.handle_action_result(io, ActionResult::Read(bytes)),
                    Err(status) => store.handle_action_result(io, ActionResult::Failed(status)),
                });
            }
        }
        Ok(self.store.next_response().and_then(|(_, completion)| completion.ok()))
    }
}

/// Compares the recorded space usage of a volume with the counted one.
fn compare_usage(counted: &CountedUsage, reported: Option<SpaceUsage>) -> Option<CheckFinding> {
    let CountedUsage { volume, volume_usage: account, .. } = *counted;
    let reported = reported.unwrap_or_default();
    let numbers = [
        ("unique blocks", reported.unique, account.unique),
        ("shared blocks", reported.shared, account.shared),
        ("reserved blocks", reported.reserved, account.reserved),
        ("missing blocks", reported.missing, account.missing),
    ];
    let wrong = numbers.into_iter().find(|(_, reported, counted)| reported != counted);
    let (what, recorded, counted) = wrong.unwrap_or(("used blocks", reported.used, account.used));
    (reported != account).then_some(CheckFinding::Number { what, volume, recorded, counted })
}
