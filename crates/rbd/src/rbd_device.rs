//! An image as a block device.
//!
//! ```text
//!   channel of a thread ──┐
//!   channel of a thread ──┼── bdev: one context, shared ── RbdChannel ── librbd
//!   channel of a thread ──┘
//! ```
//!
//! An image is open once in a process, whatever the number of threads: another handle would be another client, and the
//! exclusive lock would pass between them. The block layer shares the only channel, resizes the device and removes it.

use std::sync::Arc;

use tenmil_base::{BlockDevice, BlockExtent, Error, ExtentKind, IoChannel, Limits};
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevDescriptor, BdevOptions, Claim, Opener, QueueMap};

use crate::ceph_error::ceph_error;
use crate::open_image::OpenImage;
use crate::rbd_channel::RbdChannel;
use crate::watcher::{WatchedImage, Watcher};

/// An image as a block device.
pub(crate) struct RbdDevice {
    image: Arc<OpenImage>,
    descriptor: BdevDescriptor,
    /// The watcher refers to it weakly.
    _watched: Arc<WatchedImage>,
    _watcher: Arc<Watcher>,
}

/// What the bdev is over: a device with one channel.
struct SingleChannel(Arc<OpenImage>);

/// Maximum number of channels, all of which share that of the image.
const CHANNELS_MAX: u32 = 1024;
/// Maximum number of bytes that one query of the allocation covers: 64 objects of the usual size.
const EXTENT_BYTES_MAX: u64 = 256 << 20;

impl RbdDevice {
    pub(crate) fn new(
        opener: &Opener<'_>,
        uri: &Uri,
        image: OpenImage,
        watcher: Arc<Watcher>,
    ) -> Result<Self, Error> {
        let image = Arc::new(image);
        let options = BdevOptions {
            map: QueueMap::with_default_contexts(1),
            channels_max: CHANNELS_MAX,
            // Latency is recorded by the bdev above, if there is one.
            timing: false,
            ..BdevOptions::new(opener.clock, opener.seed)
        };
        let medium = Arc::new(SingleChannel(Arc::clone(&image)));
        let bdev = Bdev::new(&format!("{uri:#}"), medium, options)?;
        let claim = if image.is_writable() { Claim::WriteOnce } else { Claim::ReadShared };
        let descriptor = bdev
            .open(claim, "rbd")
            .map_err(|error| Error::new(error.category(), error.to_string()))?;
        let watched = watcher.watch(WatchedImage::new(Arc::clone(&image), bdev));
        Ok(Self { image, descriptor, _watched: watched, _watcher: watcher })
    }
}

impl BlockDevice for RbdDevice {
    fn limits(&self) -> Limits {
        self.descriptor.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.descriptor.channel()
    }

    fn channels_max(&self) -> u32 {
        self.descriptor.channels_max()
    }

    fn failure_reason(&self) -> Option<String> {
        self.image.loss().map(|loss| loss.to_string())
    }

    fn identity(&self) -> Option<String> {
        Some(self.image.identity().to_owned())
    }

    /// Extents of objects that exist, of this image or its parent. Asks each object, or the object map if there is one.
    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let limits = self.limits();
        let block = u64::from(limits.block_size);
        let left = limits.block_count.saturating_sub(lba).saturating_mul(block);
        if left == 0 {
            return Ok(BlockExtent { blocks: 0, kind: ExtentKind::Data });
        }
        let (start, len_bytes) = (lba * block, left.min(EXTENT_BYTES_MAX));
        let found =
            self.image.image().allocated_extents(None, start, len_bytes).map_err(|errno| {
                ceph_error(format!("read the allocation of {}", self.image.name()), errno)
            })?;
        Ok(first_extent(&found, start, start + len_bytes, block))
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        self.descriptor.refresh_size()
    }

    fn is_resizable(&self) -> bool {
        self.descriptor.is_resizable()
    }

    fn resize(&self, block_count: u64) -> Result<(), Error> {
        self.descriptor.resize(block_count)
    }
}

impl BlockDevice for SingleChannel {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(RbdChannel::new(&self.0)))
    }

    fn channels_max(&self) -> u32 {
        1
    }

    fn failure_reason(&self) -> Option<String> {
        self.0.loss().map(|loss| loss.to_string())
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        Ok(self.0.block_count())
    }

    fn is_resizable(&self) -> bool {
        self.0.is_writable()
    }

    fn resize(&self, block_count: u64) -> Result<(), Error> {
        let doing = || format!("resize {} to {block_count} blocks", self.0.name());
        let bytes = block_count.checked_mul(u64::from(self.0.limits().block_size));
        let Some(bytes) = bytes.filter(|bytes| *bytes > 0) else {
            return Err(Error::usage(format!(
                "{}: expected at least 1, and fewer than 2^64 bytes",
                doing()
            )));
        };
        self.0.image().resize(bytes).map_err(|errno| ceph_error(doing(), errno))?;
        let refreshed = self.0.refresh_size();
        refreshed.map(drop).map_err(|errno| ceph_error(doing(), errno))
    }
}

/// The first run of blocks in one state, of the allocated extents in `start..end`, which is on a block boundary. A block that
/// is allocated in part is data.
fn first_extent(
    allocated: &[(std::ops::Range<u64>, bool)],
    start: u64,
    end: u64,
    block: u64,
) -> BlockExtent {
    let data = allocated.iter().filter(|(_, has_data)| *has_data).map(|(range, _)| range);
    let mut run_end = start;
    for range in data {
        // The block that the extent begins in.
        let first = range.start.max(start) / block * block;
        if first > run_end {
            break;
        }
        run_end = run_end.max(range.end.min(end).div_ceil(block).saturating_mul(block));
    }
    if run_end > start {
        return BlockExtent { blocks: (run_end - start) / block, kind: ExtentKind::Data };
    }
    let next = allocated.iter().filter(|(_, has_data)| *has_data).map(|(range, _)| range.start);
    let hole_end = next.min().map_or(end, |next| next.min(end)) / block * block;
    BlockExtent { blocks: (hole_end - start) / block, kind: ExtentKind::Hole }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{BlockExtent, ExtentKind};

    use super::first_extent;

    #[test]
    fn first_run_of_blocks_is_data_if_any_byte_of_a_block_is() {
        let extent = |allocated: &[(u64, u64)]| {
            let allocated: Vec<_> = allocated.iter().map(|(from, to)| (*from..*to, true)).collect();
            first_extent(&allocated, 4096, 65_536, 512)
        };
        let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
        for (allocated, blocks, kind) in [
            (&[][..], 120, hole),
            (&[(8192, 9216)], 8, hole),
            (&[(8200, 9216)], 8, hole),
            (&[(4096, 4097)], 1, data),
            (&[(4096, 5120), (5120, 6000), (7000, 8000)], 4, data),
            (&[(4096, 5000), (5100, 6000)], 4, data),
            (&[(0, 100_000)], 120, data),
        ] {
            assert_eq!(extent(allocated), BlockExtent { blocks, kind }, "{allocated:?}");
        }
        let zeroed = first_extent(&[(4096..8192, false)], 4096, 65_536, 512);
        assert_eq!(zeroed.kind, ExtentKind::Hole, "an extent that was zeroed since is no data");
    }
}
