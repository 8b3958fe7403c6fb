//! Types that a block device of the program's own is made of, and those that describe devices.
//!
//! A device implements [`BlockDevice`], which opens an [`IoChannel`] for each thread that uses it;
//! [`Runtime::attach`](crate::Runtime::attach) makes it a [`Device`](crate::Device). A channel receives
//! [`Request`]s and returns [`IoCompletion`]s; the data lies in [`Segment`]s of the
//! [`RegionTable`] of the runtime, which copies bytes in and out ([`Memory`]). The example
//! `7_a_block_device_of_your_own` is a complete device.
//!
//! ```
//! use std::sync::Arc;
//! use tenmil::driver::{
//!     BlockDevice, ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion, IoStatus, Limits,
//!     Operation, OperationSet, Request, Segment,
//! };
//! use tenmil::{Access, Runtime};
//!
//! /// A device that completes flushes, and has nothing else.
//! struct Empty;
//!
//! struct EmptyChannel(Limits, Vec<u64>);
//!
//! impl BlockDevice for Empty {
//!     fn limits(&self) -> Limits {
//!         Limits {
//!             block_size: 512,
//!             metadata_size: 0,
//!             block_count: 2048,
//!             request_blocks_max: 256,
//!             segments_max: 1,
//!             optimal_boundary_blocks: 0,
//!             atomic_write_blocks: 1,
//!             depth_max: 64,
//!             durability: Durability::NonPersistent,
//!             operations: OperationSet::from_operations(&[Operation::Flush]),
//!         }
//!     }
//!
//!     fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil::Error> {
//!         Ok(Box::new(EmptyChannel(self.limits(), Vec::new())))
//!     }
//! }
//!
//! impl IoChannel for EmptyChannel {
//!     fn limits(&self) -> &Limits {
//!         &self.0
//!     }
//!
//!     fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
//!         self.1.extend(requests.iter().map(|request| request.token));
//!         requests.len()
//!     }
//!
//!     fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
//!         let count = self.1.len().min(completions.remaining());
//!         for token in self.1.drain(..count) {
//!             completions.push(IoCompletion { token, status: IoStatus::SUCCESS, result: 0 });
//!         }
//!         count
//!     }
//! }
//!
//! impl ChannelWakeup for EmptyChannel {}
//!
//! # fn main() -> Result<(), tenmil::Error> {
//! let rt = Runtime::new()?;
//! let dev = rt.block_on(rt.attach("empty", Arc::new(Empty), Access::ReadWrite))?;
//! rt.block_on(dev.flush())?;
//! # Ok(())
//! # }
//! ```

pub use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, Durability, ExtentKind, Instant,
    IoChannel, IoCompletion, IoStatus, Limits, Memory, Operation, OperationSet, Request,
    RequestFlags, Segment, WakeSource,
};
pub use tenmil_dma::RegionTable;
