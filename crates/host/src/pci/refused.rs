//! Why nothing was bound, or not given back.

use std::fmt;
use std::path::PathBuf;

use base::Blame;

use super::{Address, Obstacle, Step};
use crate::Errno;
use crate::holders::InUse;

/// Why drivers were not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindError {
    /// A function is not taken.
    Obstacle {
        /// Which.
        address: Address,
        /// The first reason.
        obstacle: Box<Obstacle>,
        /// How many more there are.
        more: usize,
    },
    /// A serial number was said that none of the functions has.
    WrongSerial {
        /// What was said.
        found: String,
    },
    /// Another process is changing drivers.
    Busy,
    /// The records cannot be used.
    Ledger {
        /// What was found.
        found: String,
    },
    /// A record is not as we write them.
    Record {
        /// Of which function.
        address: Address,
        /// Where.
        path: PathBuf,
    },
    /// Nothing is recorded of a function.
    NotOurs {
        /// Which.
        address: Address,
        /// The driver that has it.
        driver: Option<String>,
    },
    /// A program drives a function that is to be given back.
    Driven {
        /// Which.
        address: Address,
        /// Who.
        by: Vec<InUse>,
    },
    /// The driver that had a function is not there any more.
    NoDriver {
        /// Which function.
        address: Address,
        /// Which driver.
        driver: String,
    },
    /// The kernel did not do what it was told.
    Step {
        /// Of which function.
        address: Address,
        /// What it was told.
        step: Step,
        /// What came of it.
        found: Box<NotDone>,
        /// Whether all is as it was before.
        undone: bool,
    },
}

/// What came of a step that was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotDone {
    /// The kernel refused.
    Refused(Errno),
    /// Another driver has the function, or none.
    Driver(Option<String>),
    /// The record could not be written.
    Ledger(BindError),
}

impl BindError {
    /// Whose move it is.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Obstacle { obstacle, .. } => obstacle.blame(),
            Self::WrongSerial { .. } | Self::NotOurs { .. } | Self::Driven { .. } => Blame::Caller,
            _ => Blame::Machine,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> String {
        match self {
            Self::Obstacle { obstacle, more: 0, .. } => obstacle.remedy(),
            Self::Obstacle { obstacle, more, .. } => format!(
                "{} --dry-run shows {more} more reason{}.",
                obstacle.remedy(),
                if *more == 1 { "" } else { "s" }
            ),
            Self::WrongSerial { .. } => {
                "`tenmil list` shows the serial numbers; be sure that it is this disk.".into()
            }
            Self::Busy => {
                "Try again when the other `tenmil bind` or `tenmil unbind` has ended.".into()
            }
            Self::Ledger { .. } => {
                "What is bound is recorded there, by root; run it under `sudo`.".into()
            }
            Self::Record { address, .. } | Self::NotOurs { address, .. } => {
                format!("Say who is to have it: `sudo tenmil unbind {address} --to nvme`.")
            }
            Self::Driven { by, .. } => {
                let ends: Vec<String> = by.iter().map(InUse::remedy).collect();
                format!("End it with {}.", ends.join(" and "))
            }
            Self::NoDriver { driver, .. } => format!("Load it with `sudo modprobe {driver}`."),
            Self::Step { undone: true, .. } => {
                "All is as it was; `dmesg` may say more, and `tenmil doctor` looks at the rest."
                    .into()
            }
            Self::Step { address, .. } => format!(
                "`dmesg` may say more; `sudo tenmil unbind {address}` gives it back to its former \
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
            Self::Ledger { found } => out.write_str(found),
            Self::Record { address, path } => write!(
                out,
                "unbind {address}: {} is not as tenmil writes it, expected boot, driver, override \
                 and no-iommu",
                path.display()
            ),
            Self::NotOurs { address, driver } => write!(
                out,
                "unbind {address}: driver is {}, and no record says that tenmil has bound it",
                named(driver.as_deref())
            ),
            Self::Driven { address, by } => {
                let by: Vec<String> = by.iter().map(ToString::to_string).collect();
                write!(out, "unbind {address}: {}, expected nobody", by.join(" and "))
            }
            Self::NoDriver { address, driver } => {
                write!(out, "unbind {address}: driver {driver} is not loaded, expected it to be")
            }
            Self::Step { address, step, found, .. } => {
                write!(out, "{}: ", step.shown(*address))?;
                match &**found {
                    NotDone::Refused(errno) => write!(out, "{errno}"),
                    NotDone::Driver(driver) => write!(
                        out,
                        "driver is {}, expected {}",
                        named(driver.as_deref()),
                        step.driver().unwrap_or("none")
                    ),
                    NotDone::Ledger(error) => error.fmt(out),
                }
            }
        }
    }
}

impl std::error::Error for BindError {}

fn named(driver: Option<&str>) -> String {
    driver.map_or_else(|| "none".into(), |driver| format!("'{driver}'"))
}
