//! User-space NVMe storage stack: open block devices, read and write them with futures, and serve them.
//!
//! ```
//! use tenmil::{Access, Export, Runtime};
//!
//! fn main() -> Result<(), tenmil::Error> {
//!     let rt = Runtime::new()?;
//!     rt.block_on(async {
//!         // An emulated SSD; `file:PATH`, `tcp://HOST:PORT/NQN` and `pcie:ADDRESS` are opened alike.
//!         let dev = rt.open("emu:ram", Access::ReadWrite).await?;
//!         let buf = dev.read(7, dev.buffer(4096)?).await?;
//!         println!("{}: {:02x?} …", dev.name(), &buf.to_vec()[..8]);
//!
//!         // The same device for NVMe/TCP hosts, until the server is dropped.
//!         let server = rt.serve(Export::nvme_tcp("127.0.0.1:0").namespace(dev)).await?;
//!         println!("{}", server.uris()[0]);
//!         Ok(())
//!     })
//! }
//! ```
//!
//! | task | items |
//! |---|---|
//! | start, and choose cores and memory | [`Runtime`], [`RuntimeBuilder`], [`PollMode`] |
//! | open a device by URI, share it, close it | [`Runtime::open`], [`Access`], [`Device::close`] |
//! | read, write, flush, deallocate, compare, copy | [`Device`], [`Buffer`], [`IoError`] |
//! | run tasks where the device is polled | [`Device::spawn`], [`JoinHandle`] |
//! | serve NVMe/TCP hosts and NBD clients | [`Runtime::serve`], [`Export`], [`Server`] |
//! | write a block device | [`driver`], [`Runtime::attach`] |
//!
//! A failure is an [`Error`] with a [category](ErrorCategory), one line of text and perhaps a hint.
//! The futures work in any executor. What may block runs on threads of the runtime, never on the thread
//! that polls a future.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod access;
mod blocking;
mod device;
pub mod driver;
mod export;
#[cfg(any(not(feature = "crypt"), not(feature = "rbd")))]
mod omitted_devices;
mod open_devices;
mod runtime;
mod server;

use tenmil_block::{NamedDeviceType, join_device_types};

pub use access::Access;
pub use device::{Buffer, Device, IoError, IoErrorKind};
pub use export::{Export, NbdTls};
pub use runtime::{Runtime, RuntimeBuilder};
pub use server::Server;
pub use tenmil_base::{Error, ErrorCategory};
pub use tenmil_reactor::PollMode;
pub use tenmil_reactor::task::{JoinError, JoinHandle};

/// All device types, by URI scheme, for the program `tenmil`.
#[doc(hidden)]
pub const KINDS: &[NamedDeviceType<'static>] =
    &join_device_types::<{ tenmil_devices::KINDS.len() + 2 }>(
        tenmil_devices::KINDS,
        &[("rbd", RBD), ("crypt", CRYPT)],
    );

#[cfg(feature = "crypt")]
const CRYPT: &dyn tenmil_block::DeviceType = &tenmil_crypt::open;
#[cfg(not(feature = "crypt"))]
const CRYPT: &dyn tenmil_block::DeviceType = &omitted_devices::open_crypt;

#[cfg(feature = "rbd")]
const RBD: &dyn tenmil_block::DeviceType = &tenmil_rbd::open;
#[cfg(not(feature = "rbd"))]
const RBD: &dyn tenmil_block::DeviceType = &omitted_devices::open_rbd;

/// Compiles and runs the examples of README.md as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct FirstPage;

/// Compiles and runs the programs of the library guide as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/user/library.md")]
struct LibraryGuide;
