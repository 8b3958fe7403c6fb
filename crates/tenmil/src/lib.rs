//! User-space NVMe storage stack.
//!
//! | module | contents |
//! |---|---|
//! | [`aio`] | block devices for programs written with async and await |
//!
//! A device is named by a [`Uri`]; a failure is an [`Error`] with a category.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod aio;
#[cfg(not(feature = "crypt"))]
mod no_crypt;

// Dependencies that a program on reactors also needs.
pub use {tenmil_base as base, tenmil_linux as linux, tenmil_reactor as reactor};

use tenmil_block::{Kind, join_kinds};

pub use tenmil_base::Error;
pub use tenmil_devices::Uri;

/// All device types, by URI scheme.
pub const KINDS: &[Kind<'static>] =
    &join_kinds::<{ tenmil_devices::KINDS.len() + 1 }>(tenmil_devices::KINDS, &[("crypt", CRYPT)]);

#[cfg(feature = "crypt")]
const CRYPT: &dyn tenmil_block::DeviceType = &tenmil_crypt::open;
#[cfg(not(feature = "crypt"))]
const CRYPT: &dyn tenmil_block::DeviceType = &no_crypt::open;

/// Compiles and runs the examples of README.md as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct FirstPage;
