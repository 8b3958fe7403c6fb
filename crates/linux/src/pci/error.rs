//! Errors of binding and unbinding.

use std::fmt;
use std::path::PathBuf;

use tenmil_base::ErrorCategory;

use super::{BindObstacle, BindStep, PciAddress};
use crate::Errno;
use crate::device_users::DeviceUser;

/// Drivers were not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindError {
    /// A function cannot be bound.
    Obstacle {
        /// Its address.
        address: PciAddress,
        /// The first obstacle.
        obstacle: Box<BindObstacle>,
        /// Number of further obstacles.
        more: usize,
    },
    /// No function has the given serial number.
    WrongSerial {
        /// Given serial number.
        found: String,
    },
    /// Another process is changing drivers.
    Busy,
    /// The bind records are not usable.
    Records {
        /// Problem found.
        found: String,
    },
    /// A record is malformed.
    Record {
        /// Address of its function.
        address: PciAddress,
        /// Path of the record.
        path: PathBuf,
    },
    /// A function has no record.
    NotRecorded {
        /// Its address.
        address: PciAddress,
        /// Bound driver.
        driver: Option<String>,
    },
    /// A program uses the function to be returned.
    InUse {
        /// Its address.
        address: PciAddress,
        /// The processes.
        by: Vec<DeviceUser>,
    },
    /// The original driver is missing.
    NoDriver {
        /// Address of the function.
        address: PciAddress,
        /// Name of the driver.
        driver: String,
    },
    /// A step failed.
    Step {
        /// Address of the function.
        address: PciAddress,
        /// The step.
        step: BindStep,
        /// Cause.
        found: Box<StepError>,
        /// Whether the original state was restored.
        undone: bool,
    },
}

/// Cause of a failed step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepError {
    /// The kernel refused.
    Refused(Errno),
    /// Another driver, or none, is bound.
    Driver(Option<String>),
    /// The record could not be written.
    Records(BindError),
}

impl BindError {
    /// Error category.
    pub fn category(&self) -> ErrorCategory {
        match self {
            Self::Obstacle { obstacle, .. } => obstacle.category(),
            Self::WrongSerial { .. } | Self::NotRecorded { .. } | Self::InUse { .. } => {
                ErrorCategory::Usage
            }
            _ => ErrorCategory::Environment,
        }
    }

    /// Fix.
    pub fn fix(&self) -> String {
        match self {
            Self::Obstacle { obstacle, more: 0, .. } => obstacle.fix(),
            Self::Obstacle { obstacle, more, .. } => format!(
                "{} --dry-run shows {more} more reason{}.",
                obstacle.fix(),
                if *more == 1 { "" } else { "s" }
            ),
            Self::WrongSerial { .. } => {
                "`tenmil list` shows the serial numbers; be sure that it is this disk.".into()
            }
            Self::Busy => {
                "Try again when the other `tenmil bind` or `tenmil unbind` has ended.".into()
            }
            Self::Records { .. } => {
                "What is bound is recorded there, by root; run it under `sudo`.".into()
            }
            Self::Record { address, .. } | Self::NotRecorded { address, .. } => {
                format!("Name the driver to bind: `sudo tenmil unbind {address} --to nvme`.")
            }
            Self::InUse { by, .. } => {
                let ends: Vec<String> = by.iter().map(DeviceUser::release_command).collect();
                format!("End it with {}.", ends.join(" and "))
            }
            Self::NoDriver { driver, .. } => format!("Load it with `sudo modprobe {driver}`."),
            Self::Step { undone: true, .. } => {
                "The former state is restored; see `dmesg` and `tenmil doctor`.".into()
            }
            Self::Step { address, .. } => format!(
                "See `dmesg`; `sudo tenmil unbind {address}` binds it to its former \
                 driver."
            ),
        }
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Obstacle { address, obstacle, .. } => write!(out, "bind {address}: {obstacle}"),
            Self::WrongSerial { found } => write!(
                out,
                "--even-if-in-use is `{found}`, expected the serial number of a disk that is named"
            ),
            Self::Busy => {
                out.write_str("lock /run/tenmil: another process changes drivers, expected none")
            }
            Self::Records { found } => out.write_str(found),
            Self::Record { address, path } => write!(
                out,
                "unbind {address}: {} is not as tenmil writes it, expected boot, driver, override \
                 and no-iommu",
                path.display()
            ),
            Self::NotRecorded { address, driver } => write!(
                out,
                "unbind {address}: driver is {}, and there is no record that tenmil bound it",
                driver_name_text(driver.as_deref())
            ),
            Self::InUse { address, by } => {
                let by: Vec<String> = by.iter().map(ToString::to_string).collect();
                write!(out, "unbind {address}: {}, expected it not in use", by.join(" and "))
            }
            Self::NoDriver { address, driver } => {
                write!(out, "unbind {address}: driver {driver} is not loaded, expected it to be")
            }
            Self::Step { address, step, found, .. } => {
                write!(out, "{}: ", step.shell_command(*address))?;
                match &**found {
                    StepError::Refused(errno) => write!(out, "{errno}"),
                    StepError::Driver(driver) => write!(
                        out,
                        "driver is {}, expected {}",
                        driver_name_text(driver.as_deref()),
                        step.bound_driver().unwrap_or("none")
                    ),
                    StepError::Records(error) => error.fmt(out),
                }
            }
        }
    }
}

impl std::error::Error for BindError {}

impl From<BindError> for tenmil_base::Error {
    fn from(error: BindError) -> Self {
        Self::new(error.category(), error.to_string()).with_hint(error.fix())
    }
}

fn driver_name_text(driver: Option<&str>) -> String {
    driver.map_or_else(|| "none".into(), |driver| format!("'{driver}'"))
}
