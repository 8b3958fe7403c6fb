//! Block device parameters as virtio-blk sees them, and validation of requests.

use tenmil_base::{Durability, Error, IoStatus, Limits, Operation, RequestFlags};
use tenmil_vhost_user::features::device;
use tenmil_vhost_user::virtio_blk::{
    BlkConfig, BlkRequestHeader, BlkRequestType, BlkStatus, DiscardSegment, ID_BYTES, SECTOR_BYTES,
};

/// Disk parameters. Requests of the guest are validated against them.
#[derive(Clone, Debug)]
pub(super) struct VirtioDisk {
    limits: Limits,
    is_read_only: bool,
    /// log2 of the sectors per block.
    shift: u32,
    id: [u8; ID_BYTES],
}

/// Validated request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskRequest {
    pub(super) operation: Operation,
    pub(super) flags: RequestFlags,
    pub(super) lba: u64,
    pub(super) blocks: u32,
}

/// Largest number of data segments of a request: with header and status they fit into a ring of
/// 128.
pub(super) const SEGMENTS_MAX: u32 = 126;
/// Largest segment. The product of both limits a request.
const SEGMENT_BYTES_MAX: u32 = 256 << 10;
const REQUEST_BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64;
/// Largest discard or write-zeroes request, in bytes.
const STRETCH_BYTES_MAX: u32 = 64 << 20;
const PAGE_BYTES: u32 = 4096;
/// Largest block size that guests support.
const BLOCK_BYTES_MAX: u32 = 64 << 10;

impl VirtioDisk {
    /// Creates disk parameters from device limits, with the serial `id`.
    ///
    /// # Errors
    ///
    /// If virtio-blk cannot represent such a device.
    pub(super) fn new(
        limits: Limits,
        is_read_only: bool,
        id: [u8; ID_BYTES],
    ) -> Result<Self, Error> {
        let Limits { block_size, metadata_size, block_count, .. } = limits;
        if metadata_size != 0 {
            return Err(Error::environment(format!(
                "its blocks have {metadata_size} bytes of metadata, expected none"
            )));
        }
        if !(SECTOR_BYTES..=BLOCK_BYTES_MAX).contains(&block_size) || !block_size.is_power_of_two()
        {
            return Err(Error::environment(format!(
                "its blocks have {block_size} bytes, expected a power of two from {SECTOR_BYTES} to \
                 {BLOCK_BYTES_MAX}"
            )));
        }
        if block_count == 0 {
            return Err(Error::environment("it has no blocks, expected some".to_owned()));
        }
        let needed = u16::try_from(SEGMENTS_MAX).unwrap_or(u16::MAX);
        if limits.segments_max < needed {
            let found = limits.segments_max;
            return Err(Error::environment(format!(
                "its requests have {found} segments at most, expected {needed}"
            )));
        }
        let shift = (block_size / SECTOR_BYTES).ilog2();
        Ok(Self { limits, is_read_only, shift, id })
    }

    /// Changes the number of blocks.
    pub(super) fn set_block_count(&mut self, block_count: u64) {
        self.limits.block_count = block_count;
    }

    /// Device id string.
    pub(super) fn device_id(&self) -> [u8; ID_BYTES] {
        self.id
    }

    /// Device features. Flush is not offered for a device without a write cache, nor for volatile
    /// storage, where a flush would not help.
    pub(super) fn features(&self) -> u64 {
        let mut features = device::SIZE_MAX
            | device::SEG_MAX
            | device::BLK_SIZE
            | device::TOPOLOGY
            | device::MQ
            | device::RING_INDIRECT_DESC
            | device::RING_EVENT_IDX
            | device::VERSION_1;
        if self.is_read_only {
            features |= device::RO;
        }
        if self.has_write_cache() && self.supports(Operation::Flush) {
            features |= device::FLUSH;
        }
        if self.is_offered(Operation::Deallocate) {
            features |= device::DISCARD;
        }
        if self.is_offered(Operation::WriteZeroes) {
            features |= device::WRITE_ZEROES;
        }
        features
    }

    pub(super) fn config_space(&self, queues: u16) -> BlkConfig {
        let block_bytes = self.limits.block_size;
        let physical = PAGE_BYTES.max(block_bytes) / block_bytes;
        let most = |operation| match self.is_offered(operation) {
            true => STRETCH_BYTES_MAX / SECTOR_BYTES,
            false => 0,
        };
        BlkConfig {
            sectors: self.sector_count(),
            segment_bytes_max: SEGMENT_BYTES_MAX,
            segments_max: SEGMENTS_MAX,
            block_bytes,
            physical_exponent: u8::try_from(physical.ilog2()).unwrap_or(0),
            queues,
            discard_sectors_max: most(Operation::Deallocate),
            zero_sectors_max: most(Operation::WriteZeroes),
        }
    }

    fn sector_count(&self) -> u64 {
        self.limits.block_count << self.shift
    }

    fn has_write_cache(&self) -> bool {
        self.limits.durability == Durability::VolatileCache
    }

    fn supports(&self, operation: Operation) -> bool {
        self.limits.operations.has(operation)
    }

    fn is_offered(&self, operation: Operation) -> bool {
        !self.is_read_only && self.supports(operation)
    }

    /// Validates a read or write, or returns its status. If the driver has not negotiated
    /// `VIRTIO_BLK_F_FLUSH`, completed writes must be durable (virtio 5.2.6.2).
    #[inline]
    pub(super) fn validate_transfer(
        &self,
        header: BlkRequestHeader,
        len_bytes: u64,
        segments: usize,
        features: u64,
    ) -> Result<DiskRequest, BlkStatus> {
        let (operation, flags) = match header.kind {
            BlkRequestType::Read => (Operation::Read, RequestFlags::NONE),
            BlkRequestType::Write if self.is_read_only => return Err(BlkStatus::ERROR),
            BlkRequestType::Write if self.has_write_cache() && features & device::FLUSH == 0 => {
                (Operation::Write, RequestFlags::FUA)
            }
            _ => (Operation::Write, RequestFlags::NONE),
        };
        if len_bytes > REQUEST_BYTES_MAX || segments > usize::from(self.limits.segments_max) {
            return Err(BlkStatus::ERROR);
        }
        let sector_bytes = u64::from(SECTOR_BYTES);
        if !len_bytes.is_multiple_of(sector_bytes) {
            return Err(BlkStatus::ERROR);
        }
        let (lba, blocks) = self.block_range(header.sector, len_bytes / sector_bytes)?;
        Ok(DiskRequest { operation, flags, lba, blocks })
    }

    /// Validates a flush; `None` if there is nothing to flush.
    pub(super) fn validate_flush(&self) -> Option<DiskRequest> {
        let ask = DiskRequest {
            operation: Operation::Flush,
            flags: RequestFlags::NONE,
            lba: 0,
            blocks: 0,
        };
        (self.has_write_cache() && self.supports(Operation::Flush)).then_some(ask)
    }

    /// Validates a discard or write-zeroes request.
    pub(super) fn validate_discard(
        &self,
        kind: BlkRequestType,
        stretch: DiscardSegment,
    ) -> Result<DiskRequest, BlkStatus> {
        let DiscardSegment { sector, sectors, flags: found } = stretch;
        let (operation, flags) = match kind {
            BlkRequestType::WriteZeroes if found == DiscardSegment::UNMAP => {
                (Operation::WriteZeroes, RequestFlags::DEALLOCATE)
            }
            BlkRequestType::WriteZeroes if found == 0 => {
                (Operation::WriteZeroes, RequestFlags::NONE)
            }
            BlkRequestType::Discard if found == 0 => (Operation::Deallocate, RequestFlags::NONE),
            _ => return Err(BlkStatus::UNSUPPORTED),
        };
        if !self.supports(operation) {
            return Err(BlkStatus::UNSUPPORTED);
        }
        if self.is_read_only || sectors > STRETCH_BYTES_MAX / SECTOR_BYTES {
            return Err(BlkStatus::ERROR);
        }
        let (lba, blocks) = self.block_range(sector, sectors.into())?;
        Ok(DiskRequest { operation, flags, lba, blocks })
    }

    #[inline]
    fn block_range(&self, sector: u64, sectors: u64) -> Result<(u64, u32), BlkStatus> {
        let end = sector.checked_add(sectors).ok_or(BlkStatus::ERROR)?;
        let mask = (1 << self.shift) - 1;
        if sectors == 0 || end > self.sector_count() || (sector | sectors) & mask != 0 {
            return Err(BlkStatus::ERROR);
        }
        let blocks = u32::try_from(sectors >> self.shift).map_err(|_| BlkStatus::ERROR)?;
        Ok((sector >> self.shift, blocks))
    }
}

/// Status of a completed request for the guest.
#[inline]
pub(super) fn virtio_status(status: IoStatus) -> BlkStatus {
    match status {
        IoStatus::SUCCESS => BlkStatus::OK,
        IoStatus::INVALID_OPCODE => BlkStatus::UNSUPPORTED,
        _ => BlkStatus::ERROR,
    }
}
