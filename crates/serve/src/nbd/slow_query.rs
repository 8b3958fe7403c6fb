//! Slow queries: block status and resize, executed on worker threads because the device may block.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{BlockDevice, ExtentKind};
use tenmil_linux::thread_pool::{BlockingTask, ThreadPool};
use tenmil_reactor::ThreadHandle;
use tenmil_wire::nbd::{BlockStatusExtent, ErrorCode, ExtentFlags};

use super::exported_device::ExportedDevice;
use super::transmission::{QueryKind, SlowQuery};

/// Pending slow queries of one connection.
pub(super) struct SlowQueries {
    /// `None` before the client has selected an export.
    exported_device: Option<Arc<ExportedDevice>>,
    pool: Arc<ThreadPool>,
    query_results: Arc<QueryResults>,
    /// Queries not yet completed.
    open: usize,
}

/// Results of slow queries, filled by the worker threads.
#[derive(Default)]
struct QueryResults {
    results: Mutex<Vec<(u16, SlowQueryResult)>>,
    count: AtomicUsize,
}

/// Result of a slow query.
pub(super) enum SlowQueryResult {
    /// Extents of the range; empty if the device cannot report them.
    Extents(Vec<BlockStatusExtent>),
    /// Result of a resize: NBD error code and message.
    Size(Result<(), (ErrorCode, String)>),
}

impl SlowQueries {
    pub(super) fn new(pool: Arc<ThreadPool>) -> Self {
        Self { exported_device: None, pool, query_results: Arc::default(), open: 0 }
    }

    /// Sets the device of the export that the client has selected.
    pub(super) fn set_device(&mut self, exported_device: Arc<ExportedDevice>) {
        self.exported_device = Some(exported_device);
    }

    /// Queues a query. Wakes `thread` when the result is available.
    pub(super) fn submit(&mut self, query: SlowQuery, thread: ThreadHandle) {
        let SlowQuery { slot, kind } = query;
        let Some(exported_device) = self.exported_device.clone() else { return };
        let query_results = Arc::clone(&self.query_results);
        let job = BlockingTask::new("queries", move || {
            query_results.push(slot, run_query(&exported_device, kind));
            thread.notify_reactor();
        });
        self.open += 1;
        if self.pool.submit(job).is_err() {
            self.query_results.push(slot, too_many_queries_result(kind));
        }
    }

    /// Whether a result is available.
    #[inline]
    pub(super) fn has_results(&self) -> bool {
        self.open > 0 && self.query_results.count.load(Ordering::Acquire) > 0
    }

    /// Removes and returns all results.
    pub(super) fn take_results(&mut self) -> Vec<(u16, SlowQueryResult)> {
        let taken = std::mem::take(
            &mut *self.query_results.results.lock().unwrap_or_else(PoisonError::into_inner),
        );
        self.query_results.count.fetch_sub(taken.len(), Ordering::Relaxed);
        self.open -= taken.len();
        taken
    }
}

impl QueryResults {
    fn push(&self, slot: u16, result: SlowQueryResult) {
        self.results.lock().unwrap_or_else(PoisonError::into_inner).push((slot, result));
        // Release; pairs with the acquire in `has_results`.
        self.count.fetch_add(1, Ordering::Release);
    }
}

fn run_query(exported_device: &ExportedDevice, kind: QueryKind) -> SlowQueryResult {
    match kind {
        QueryKind::Extents { .. } => {
            SlowQueryResult::Extents(block_status_extents(&**exported_device.block_device(), kind))
        }
        QueryKind::Size { bytes } => {
            let grows = bytes > exported_device.export().size_bytes();
            let error = if grows { ErrorCode::ENOSPC } else { ErrorCode::EIO };
            SlowQueryResult::Size(
                exported_device.resize(bytes).map_err(|why| (error, why.to_string())),
            )
        }
    }
}

fn too_many_queries_result(kind: QueryKind) -> SlowQueryResult {
    match kind {
        // Reporting data is always correct ("Request types", NBD_CMD_BLOCK_STATUS).
        QueryKind::Extents { len_bytes, .. } => SlowQueryResult::Extents(vec![BlockStatusExtent {
            len_bytes,
            flags: ExtentFlags::NONE,
        }]),
        QueryKind::Size { .. } => SlowQueryResult::Size(Err((
            ErrorCode::ENOMEM,
            "resize: too many queries are pending".to_owned(),
        ))),
    }
}

/// Returns the extents of a range. Adjacent extents of the same kind are merged, and the last one
/// is cut at the end of the range. Empty if the device cannot report them.
pub(super) fn block_status_extents(
    medium: &dyn BlockDevice,
    kind: QueryKind,
) -> Vec<BlockStatusExtent> {
    let block_size = u64::from(medium.limits().block_size);
    let QueryKind::Extents { offset, len_bytes, extents_max } = kind else { return Vec::new() };
    let end = offset + u64::from(len_bytes);
    let mut extents: Vec<BlockStatusExtent> = Vec::new();
    let mut at = offset;
    while at < end {
        let Ok(extent) = medium.block_status(at / block_size) else { break };
        // An extent of no blocks would loop forever.
        let blocks = extent.blocks.max(1);
        let until = (at / block_size).saturating_add(blocks).saturating_mul(block_size).min(end);
        let len_bytes = u32::try_from(until - at).unwrap_or(u32::MAX);
        let flags = extent_flags(extent.kind);
        let events = extents.len();
        match extents.last_mut() {
            Some(last) if last.flags == flags => last.len_bytes += len_bytes,
            _ if events == extents_max => break,
            _ => extents.push(BlockStatusExtent { len_bytes, flags }),
        }
        at = until;
    }
    extents
}

fn extent_flags(holds: ExtentKind) -> ExtentFlags {
    match holds {
        ExtentKind::Data => ExtentFlags::NONE,
        ExtentKind::Zeroes => ExtentFlags::ZERO,
        ExtentKind::Hole => ExtentFlags::ZERO.union(ExtentFlags::HOLE),
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{BlockDevice, BlockExtent, ExtentKind, IoChannel, Limits};
    use tenmil_drivers::NullDevice;

    use super::{QueryKind, block_status_extents};

    /// 512-byte blocks, repeating: a hole of four blocks, data of two, zeroes of two that are
    /// reported one by one.
    struct Striped;

    impl BlockDevice for Striped {
        fn limits(&self) -> Limits {
            NullDevice::new(512, 64).unwrap().limits()
        }

        fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
            Err(tenmil_base::Error::environment("no channel in this test"))
        }

        fn block_status(&self, lba: u64) -> Result<BlockExtent, tenmil_base::Error> {
            match lba % 8 {
                at @ 0..4 => Ok(BlockExtent { blocks: 4 - at, kind: ExtentKind::Hole }),
                at @ 4..6 => Ok(BlockExtent { blocks: 6 - at, kind: ExtentKind::Data }),
                _ => Ok(BlockExtent { blocks: 1, kind: ExtentKind::Zeroes }),
            }
        }
    }

    fn block_status_extents_of(offset: u64, len_bytes: u32, extents_max: usize) -> Vec<(u32, u32)> {
        let query_results =
            block_status_extents(&Striped, QueryKind::Extents { offset, len_bytes, extents_max });
        query_results.iter().map(|extent| (extent.len_bytes, extent.flags.0)).collect()
    }

    #[test]
    fn extents_are_merged_clipped_and_limited_in_number() {
        assert_eq!(block_status_extents_of(0, 4096, 10), [(2048, 3), (1024, 0), (1024, 2)]);
        assert_eq!(block_status_extents_of(0, 4096, 1), [(2048, 3)]);
        assert_eq!(block_status_extents_of(100, 200, 10), [(200, 3)]);
        assert_eq!(block_status_extents_of(1900, 1000, 10), [(148, 3), (852, 0)]);
        assert_eq!(block_status_extents_of(0, 8192, 5).len(), 5);
    }
}
