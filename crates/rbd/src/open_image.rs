//! An open image with its limits, and whether it is lost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tenmil_base::{Durability, Error, Instant, Limits, Operation, OperationSet, Span};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, EventFdVectors};

use crate::ceph_error::{ImageLoss, ceph_error};
use crate::cluster::Cluster;
use crate::deadline::call_with_deadline;
use crate::librbd::{CephErrno, Functions, Image, ImageLayout, OpenMode, PoolContext};
use crate::rbd_channel::{DEPTH_MAX, SEGMENTS_MAX};
use crate::rbd_uri::{LockMode, RbdUri};

/// An open image, shared by its channel, its device and the watcher.
pub(crate) struct OpenImage {
    /// `Some` until it is dropped.
    image: Option<Image>,
    cluster: Arc<Cluster>,
    name: String,
    /// Limits as of the open.
    limits: Limits,
    /// Current number of blocks.
    block_count: AtomicU64,
    is_writable: bool,
    /// Whether this client has acquired the exclusive lock to keep it.
    keeps_lock: bool,
    identity: String,
    object_bytes: u64,
    io_timeout: Span,
    clock: Clock,
    loss: OnceLock<ImageLoss>,
    /// Wakes the watcher.
    signal: EventFdVectors,
}

/// What opening an image finds.
struct FoundImage {
    image: Image,
    layout: ImageLayout,
    keeps_lock: bool,
    identity: String,
}

/// What is passed to the thread that opens an image.
struct OpenCall {
    pool: Arc<PoolContext>,
    image: String,
    snapshot: Option<String>,
    fsid: String,
    mode: OpenMode,
    lock: LockMode,
    regions: RegionTable,
    signal: EventFdVectors,
}

/// Why a step of opening an image failed.
struct OpenRefusal {
    step: &'static str,
    errno: CephErrno,
}

/// Operations of an image that is opened to be read.
const READING: OperationSet = OperationSet::from_operations(&[Operation::Read, Operation::Flush]);
/// Operations of an image that is opened to be written.
const WRITING: OperationSet = OperationSet::from_operations(&[
    Operation::Read,
    Operation::Write,
    Operation::Flush,
    Operation::Deallocate,
    Operation::WriteZeroes,
    Operation::CompareAndWrite,
]);

/// Bytes in the largest request.
const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Maximum time to close an image.
const CLOSE_LIMIT: Span = Span::from_secs(30);
/// How much longer than its limit a request may take before its channel is dropped without it.
const DRAIN_MARGIN: Span = Span::from_secs(30);

impl OpenImage {
    /// Opens the image that `name` describes. Blocks.
    ///
    /// # Errors
    ///
    /// What was found and what was expected.
    pub(crate) fn open(
        functions: &'static Functions,
        opener: &Opener<'_>,
        uri: &Uri,
        name: &RbdUri,
        signal: &EventFdVectors,
    ) -> Result<Self, Error> {
        let context = |error: Error| error.with_context(format!("open {uri:#}"));
        let cluster = Cluster::connect(functions, &name.access).map_err(context)?;
        let pool = cluster.pool(&name.place.pool, &name.place.namespace).map_err(context)?;
        let call = OpenCall {
            pool,
            image: name.place.image.clone(),
            snapshot: name.snapshot.clone(),
            fsid: cluster.fsid().to_owned(),
            mode: if name.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite },
            lock: name.lock,
            regions: opener.regions.clone(),
            signal: signal.clone(),
        };
        let opened = call_with_deadline(name.open_timeout, move || call.run()).map_err(context)?;
        let late = OpenRefusal { step: "open the image", errno: CephErrno(libc::ETIMEDOUT) };
        let found = opened.unwrap_or(Err(late)).map_err(|OpenRefusal { step, errno }| {
            if errno.0 == libc::ESHUTDOWN {
                cluster.retire();
            }
            context(ceph_error(step, errno))
        })?;
        found.check_cache().map_err(context)?;
        let limits = limits(&found.layout, name).map_err(context)?;
        Ok(Self {
            block_count: AtomicU64::new(limits.block_count),
            limits,
            image: Some(found.image),
            cluster,
            name: format!("{uri:#}"),
            is_writable: !name.read_only,
            keeps_lock: found.keeps_lock,
            identity: found.identity,
            object_bytes: found.layout.object_bytes,
            io_timeout: name.access.io_timeout,
            clock: opener.clock,
            loss: OnceLock::new(),
            signal: signal.clone(),
        })
    }

    /// The image in librbd.
    pub(crate) fn image(&self) -> &Image {
        self.image.as_ref().expect("it is taken when the last reference is dropped")
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Unique and persistent: cluster, pool, image and snapshot.
    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    pub(crate) fn object_bytes(&self) -> u64 {
        self.object_bytes
    }

    pub(crate) fn fsid(&self) -> &str {
        self.cluster.fsid()
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Whether the exclusive lock was acquired to be kept.
    pub(crate) fn keeps_lock(&self) -> bool {
        self.keeps_lock
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits { block_count: self.block_count(), ..self.limits.clone() }
    }

    /// Relaxed: the value orders no other data.
    pub(crate) fn block_count(&self) -> u64 {
        self.block_count.load(Ordering::Relaxed)
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Maximum time until every request has completed.
    pub(crate) fn drain_limit(&self) -> Span {
        Span { ns: self.io_timeout.ns.saturating_add(DRAIN_MARGIN.ns) }
    }

    /// Why the image is lost, if it is.
    pub(crate) fn loss(&self) -> Option<ImageLoss> {
        self.loss.get().copied()
    }

    /// Fails every request from now on, and has the watcher remove the device.
    pub(crate) fn report_loss(&self, loss: ImageLoss) {
        if self.loss.set(loss).is_ok() {
            if loss == ImageLoss::Blocklisted {
                self.cluster.retire();
            }
            self.signal.signal(0);
        }
    }

    /// Reads the size again. Returns whether it has changed. Blocks.
    pub(crate) fn refresh_size(&self) -> Result<bool, CephErrno> {
        let found = self.image().size_bytes()? / u64::from(self.limits.block_size);
        Ok(self.block_count.swap(found, Ordering::Relaxed) != found)
    }
}

impl Drop for OpenImage {
    fn drop(&mut self) {
        let image = self.image.take();
        let closed = call_with_deadline(CLOSE_LIMIT, move || drop(image));
        if matches!(closed, Ok(None)) {
            let name = &self.name;
            tracing::warn!(cause = %name, "{name}: not closed within {CLOSE_LIMIT}; another client can write the image once the \
                 cluster has seen that this one is gone");
        }
    }
}

impl OpenCall {
    fn run(self) -> Result<FoundImage, OpenRefusal> {
        let refused = |step| move |errno| OpenRefusal { step, errno };
        let snapshot = self.snapshot.as_deref();
        let image = Image::open(&self.pool, &self.image, snapshot, self.mode, &self.regions);
        let mut image = image.map_err(refused("open the image"))?;
        let read = refused("read the header of the image");
        let layout = image.layout().map_err(&read)?;
        let pool = image.pool().pool_id();
        let mut identity = format!("rbd.{}.{pool}.{}", self.fsid, image.id().map_err(&read)?);
        if let Some(snapshot) = snapshot {
            identity += &format!("@{}", image.snapshot_id(snapshot).map_err(&read)?);
        }
        let is_locked = self.mode == OpenMode::ReadWrite
            && self.lock == LockMode::Exclusive
            && image.has_exclusive_lock().map_err(&read)?;
        if is_locked {
            image.acquire_lock().map_err(refused("acquire the exclusive lock"))?;
        }
        image.watch_header(&self.signal).map_err(refused("watch the header of the image"))?;
        Ok(FoundImage { image, layout, keeps_lock: is_locked, identity })
    }
}

impl FoundImage {
    /// Rejects an image of which librbd caches writes: options of the image or its pool override those of the client.
    fn check_cache(&self) -> Result<(), Error> {
        let option = |name: &str| {
            let value = self.image.option(name);
            value.map_err(|errno| ceph_error(format!("read the option {name}"), errno))
        };
        let has_cache = option("rbd_cache")?.is_some_and(|value| value == "true");
        let policy = option("rbd_cache_policy")?.unwrap_or_default();
        if has_cache && policy != "writethrough" {
            return Err(Error::environment(format!(
                "librbd caches writes of this image: rbd_cache is true and rbd_cache_policy is {policy} in the options of \
                 the image or its pool, expected rbd_cache false or the policy writethrough"
            ))
            .with_hint("Remove the option: `rbd config image remove POOL/IMAGE rbd_cache`, or `rbd config pool remove POOL rbd_cache`."));
        }
        let persistent = option("rbd_persistent_cache_mode")?;
        if let Some(mode) = persistent.filter(|mode| mode != "disabled" && !mode.is_empty()) {
            return Err(Error::environment(format!(
                "librbd keeps completed writes in a cache of this machine: rbd_persistent_cache_mode is {mode}, expected \
                 disabled"
            ))
            .with_hint("Remove the option: `rbd config image remove POOL/IMAGE rbd_persistent_cache_mode`."));
        }
        Ok(())
    }
}

fn limits(layout: &ImageLayout, name: &RbdUri) -> Result<Limits, Error> {
    let block = u64::from(name.block_size);
    let block_count = layout.size_bytes / block;
    if block_count == 0 {
        let (size, block) = (layout.size_bytes, name.block_size);
        return Err(Error::usage(format!(
            "its size is {size} bytes, expected at least a block of {block}"
        )));
    }
    let boundary = layout.stripe_unit_bytes.min(layout.object_bytes);
    let boundary = if boundary.is_multiple_of(block) { boundary / block } else { 0 };
    let in_blocks = |bytes: u64| u32::try_from(bytes / block).unwrap_or(u32::MAX);
    Ok(Limits {
        block_size: name.block_size,
        metadata_size: 0,
        block_count,
        request_blocks_max: in_blocks(REQUEST_BYTES_MAX),
        segments_max: SEGMENTS_MAX,
        optimal_boundary_blocks: u32::try_from(boundary).unwrap_or(0),
        // An object is written by a transaction, but a write may cross the end of one.
        atomic_write_blocks: 1,
        depth_max: DEPTH_MAX,
        durability: Durability::Persistent,
        operations: if name.read_only { READING } else { WRITING },
    })
}
