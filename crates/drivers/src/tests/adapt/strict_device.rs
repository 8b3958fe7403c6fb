//! A device with narrow limits, and an adapter over it.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Operation,
    OperationSet, Request, RequestFlags, Segment,
};

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{
    AdaptationOptions, AdaptedChannel, BounceBufferAllocator, DeallocateEmulation, FuaMode,
    MemoryAlignment,
};
use tenmil_block::{DeviceType, OpenedDevice, Opener};

/// Requirements of a harsh device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceRequirements {
    pub(crate) blocks_max: u32,
    pub(crate) segments_max: u16,
    pub(crate) boundary: u32,
    pub(crate) alignment: MemoryAlignment,
    pub(crate) forces: bool,
    pub(crate) deallocates: bool,
    /// Number of requests that it accepts at once, whatever its limits declare.
    pub(crate) takes: usize,
}

/// Panics on a request that exceeds its limits.
pub(crate) struct StrictDevice {
    pub(crate) inner: Arc<dyn BlockDevice>,
    pub(crate) demands: DeviceRequirements,
}

struct StrictDeviceChannel {
    inner: Box<dyn IoChannel>,
    limits: Limits,
    demands: DeviceRequirements,
    under_way: usize,
}

/// A harsh device with an adapter.
pub(crate) struct AdaptedStrictDevice {
    pub(crate) below: StrictDevice,
    pub(crate) memory: BounceBufferAllocator,
    pub(crate) options: AdaptationOptions,
}

/// Opens `harsh:[URI]?align=512&force=no`.
pub(crate) struct StrictDeviceKind;

pub(crate) const DEMANDS: DeviceRequirements = DeviceRequirements {
    blocks_max: 3,
    segments_max: 2,
    boundary: 4,
    alignment: MemoryAlignment::ANY,
    forces: true,
    deallocates: true,
    takes: usize::MAX,
};

impl DeviceRequirements {
    /// Options of an adapter for a device with these requirements.
    pub(crate) fn adapt_options(&self) -> AdaptationOptions {
        AdaptationOptions {
            alignment: self.alignment,
            force: if self.forces { FuaMode::Native } else { FuaMode::Flush },
            deallocate: if self.deallocates {
                DeallocateEmulation::Refuse
            } else {
                DeallocateEmulation::Ignore
            },
            ..AdaptationOptions::default()
        }
    }
}

impl DeviceType for StrictDeviceKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let mut fields = uri.options();
        let align = u32::try_from(fields.number_value("align", 1..=4096)?.unwrap_or(1)).unwrap();
        let forces = fields.choice_value("force", &[("yes", true), ("no", false)])?.unwrap_or(true);
        fields.reject_unconsumed()?;
        let opened = opener.open(uri.single_child()?)?;
        let alignment = MemoryAlignment { address_bytes: align, len_bytes: align };
        let demands = DeviceRequirements { alignment, forces, ..DEMANDS };
        let below = StrictDevice { inner: opened.medium.clone(), demands };
        let memory = BounceBufferAllocator::new(opener.regions, 16 << 10, 2)?;
        let options = demands.adapt_options();
        let description = format!("harsh, and shaped: over {}", opened.description);
        Ok(opened.with_device_stacked_on(
            Arc::new(AdaptedStrictDevice { below, memory, options }),
            description,
        ))
    }
}

impl BlockDevice for StrictDevice {
    fn limits(&self) -> Limits {
        let DeviceRequirements { blocks_max, segments_max, boundary, deallocates, .. } =
            self.demands;
        let mut support = OperationSet::from_operations(&[
            Operation::Read,
            Operation::Write,
            Operation::Flush,
            Operation::WriteUncorrectable,
        ]);
        if deallocates {
            support = support.with(Operation::Deallocate);
        }
        Limits {
            request_blocks_max: blocks_max,
            segments_max,
            optimal_boundary_blocks: boundary,
            operations: support,
            ..self.inner.limits()
        }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (limits, demands) = (self.limits(), self.demands);
        let inner = self.inner.channel()?;
        Ok(Box::new(StrictDeviceChannel { inner, limits, demands, under_way: 0 }))
    }
}

impl StrictDeviceChannel {
    fn assert_within_requirements(&self, request: &Request, segments: &[Segment]) {
        let DeviceRequirements { blocks_max, segments_max, boundary, alignment, forces, .. } =
            self.demands;
        assert!(self.limits.operations.has(request.operation), "{request:?}");
        if !matches!(request.operation, Operation::Read | Operation::Write) {
            return;
        }
        assert!(forces || !request.flags.has(RequestFlags::FUA), "{request:?}");
        let place = request.lba % u64::from(boundary.max(1));
        let inside = boundary == 0 || place + u64::from(request.blocks) <= u64::from(boundary);
        assert!(request.blocks <= blocks_max && inside, "{request:?}");
        assert!(request.segment_count <= segments_max, "{request:?}");
        let first = request.segment_first as usize;
        let own = segments.get(first..first + usize::from(request.segment_count));
        for segment in own.unwrap_or_default() {
            assert!(alignment.is_aligned(*segment), "{request:?} {segment:?}");
        }
    }
}

impl IoChannel for StrictDeviceChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let room = requests.len().min(self.demands.takes - self.under_way);
        requests[..room]
            .iter()
            .for_each(|request| self.assert_within_requirements(request, segments));
        let count = self.inner.submit(now, &requests[..room], segments);
        self.under_way += count;
        count
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let count = self.inner.poll(now, completions);
        self.under_way -= count;
        count
    }
}

impl ChannelWakeup for StrictDeviceChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.inner)
    }
}

impl BlockDevice for AdaptedStrictDevice {
    fn limits(&self) -> Limits {
        let channel = self.channel().unwrap();
        channel.limits().clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let below = self.below.channel()?;
        let buffers = self.memory.allocate_channel_buffers().map_err(Error::environment)?;
        let shaper = AdaptedChannel::new(below, (), buffers, &self.options);
        Ok(Box::new(shaper.map_err(Error::environment)?))
    }
}
