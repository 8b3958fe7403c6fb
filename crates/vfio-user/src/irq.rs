//! Interrupts of a device: properties, and requests of the client.

use crate::body_codec::{BodyReader, BodyWriter};
use crate::{Command, Violation};

/// Interrupts of one kind (Protocol Specification, VFIO_USER_DEVICE_GET_IRQ_INFO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of interrupts; zero if the device has none of this kind.
    pub count: u32,
    /// Whether they can be masked by message.
    pub is_maskable: bool,
    /// Whether they must be configured as a whole.
    pub is_fixed: bool,
}

/// Request of the client for interrupts (Protocol Specification, VFIO_USER_DEVICE_SET_IRQS).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrqSet<F> {
    /// Interrupt index.
    pub index: u32,
    /// First interrupt.
    pub start: u32,
    /// Number of interrupts. Zero from 0 on, without data, disables all of this kind.
    pub count: u32,
    /// Action, or the condition under which eventfds are signalled.
    pub action: IrqAction,
    /// Selected interrupts, or eventfds.
    pub data: IrqSelection<F>,
}

/// Action on an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask.
    Mask,
    /// Unmask.
    Unmask,
    /// Trigger.
    Trigger,
}

/// Selection of interrupts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IrqSelection<F> {
    /// All of the range.
    All,
    /// Those with a true entry.
    Some(Vec<bool>),
    /// An eventfd for each of the range; an empty list removes their eventfds.
    Files(Vec<F>),
}

const EVENTFD: u32 = 1;
const MASKABLE: u32 = 1 << 1;
const NORESIZE: u32 = 1 << 3;

const DATA_NONE: u32 = 1;
const DATA_BOOL: u32 = 1 << 1;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_MASK: u32 = 1 << 3;
const ACTION_UNMASK: u32 = 1 << 4;
const ACTION_TRIGGER: u32 = 1 << 5;
const DATA: u32 = 7;

/// Size of the structure without data, in bytes.
const SET_BYTES: usize = 20;

impl IrqInfo {
    pub(crate) fn encode(&self, index: u32) -> Vec<u8> {
        let maskable = if self.is_maskable { MASKABLE } else { 0 };
        let flags = EVENTFD | maskable | if self.is_fixed { NORESIZE } else { 0 };
        BodyWriter::default().u32(16).u32(flags).u32(index).u32(self.count).into_bytes()
    }

    pub(crate) fn parse(body: &[u8], index: u32) -> Option<Self> {
        let mut reader = BodyReader(body);
        let (_, flags) = (reader.u32()?, reader.u32()?);
        let (found, count) = (reader.u32()?, reader.u32()?);
        let (is_maskable, is_fixed) = (flags & MASKABLE != 0, flags & NORESIZE != 0);
        (found == index).then_some(Self { count, is_maskable, is_fixed })
    }
}

impl<F> IrqSet<F> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (flag, bytes) = match &self.data {
            IrqSelection::All => (DATA_NONE, Vec::new()),
            IrqSelection::Some(which) => {
                (DATA_BOOL, which.iter().map(|is| u8::from(*is)).collect())
            }
            IrqSelection::Files(_) => (DATA_EVENTFD, Vec::new()),
        };
        let action = match self.action {
            IrqAction::Mask => ACTION_MASK,
            IrqAction::Unmask => ACTION_UNMASK,
            IrqAction::Trigger => ACTION_TRIGGER,
        };
        let len = u32::try_from(SET_BYTES + bytes.len()).unwrap_or(u32::MAX);
        let head = BodyWriter::default().u32(len).u32(flag | action);
        head.u32(self.index).u32(self.start).u32(self.count).slice(&bytes).into_bytes()
    }

    /// Parses a request for a device with `irqs`.
    pub(crate) fn parse(body: &[u8], files: Vec<F>, irqs: &[IrqInfo]) -> Result<Self, Violation> {
        let mut reader = BodyReader(body);
        let mut next = || {
            reader.u32().ok_or(Violation::Body {
                command: Command::DeviceSetIrqs,
                found: body.len(),
                expected: "20 bytes and the data",
            })
        };
        let (_, flags, index, start, count) = (next()?, next()?, next()?, next()?, next()?);
        let shape = irqs.get(index as usize).filter(|shape| shape.count > 0 || count == 0);
        let shape =
            shape.ok_or(irq_field_violation("index", index, "interrupts that the device has"))?;
        if start.checked_add(count).is_none_or(|end| end > shape.count) {
            return Err(irq_field_violation(
                "start plus count",
                start,
                "interrupts that the device has",
            ));
        }
        let action = match flags & !DATA {
            ACTION_MASK => IrqAction::Mask,
            ACTION_UNMASK => IrqAction::Unmask,
            ACTION_TRIGGER => IrqAction::Trigger,
            _ => return Err(irq_field_violation("flags", flags, "one action")),
        };
        let found_files = files.len();
        let (data, len, files) = match flags & DATA {
            DATA_NONE => (IrqSelection::All, 0, 0),
            DATA_BOOL => {
                let which = reader.remaining().iter().map(|byte| *byte != 0).collect();
                (IrqSelection::Some(which), count as usize, 0)
            }
            DATA_EVENTFD => {
                let expected = if found_files == 0 { 0 } else { count as usize };
                (IrqSelection::Files(files), 0, expected)
            }
            _ => return Err(irq_field_violation("flags", flags, "one kind of data")),
        };
        if found_files != files {
            return Err(Violation::Files {
                command: Command::DeviceSetIrqs,
                found: found_files,
                expected: "one for each interrupt, or none",
            });
        }
        if reader.remaining().len() != len {
            return Err(Violation::Body {
                command: Command::DeviceSetIrqs,
                found: body.len(),
                expected: "a byte for each interrupt if there are such data, and none otherwise",
            });
        }
        Ok(Self { index, start, count, action, data })
    }
}

fn irq_field_violation(field: &'static str, found: u32, expected: &'static str) -> Violation {
    Violation::Field { command: Command::DeviceSetIrqs, field, found: found.into(), expected }
}
