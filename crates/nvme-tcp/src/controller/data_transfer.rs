//! Data transfer of a command, derived from opcode, SGL and capsule (§3.3.2).

use tenmil_wire::opcode::TransferDirection;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{AdminOpcode, Command, DataPointer, Status};

use super::DataTransfer;

/// Whether `command` is a Fabrics command.
#[inline]
pub(super) fn is_fabrics(command: &Command) -> bool {
    command.opcode() == AdminOpcode::FabricsCommands.code()
}

/// Direction of a command's data: the lowest bits of its opcode, or of FCTYPE.
#[inline]
fn transfer_direction(command: &Command) -> TransferDirection {
    let code = if is_fabrics(command) { command.nsid().to_le_bytes()[0] } else { command.opcode() };
    TransferDirection::from_opcode(code)
}

/// Determines the data transfer of a command, or the status if it is invalid.
#[inline]
pub(super) fn classify_transfer(
    command: &Command,
    capsule_bytes: u32,
    transfer_bytes_max: u32,
) -> Result<DataTransfer, Status> {
    let direction = transfer_direction(command);
    if direction == TransferDirection::None {
        // The SGL of a command without data is not evaluated.
        return if capsule_bytes == 0 {
            Ok(DataTransfer::None)
        } else {
            Err(Status::DATA_SGL_LENGTH_INVALID)
        };
    }
    let sgl = command.sgl1();
    let len_bytes = sgl.len_bytes();
    if len_bytes == 0 && capsule_bytes == 0 {
        // Nothing is transferred: the host may have left the SGL unset.
        return Ok(DataTransfer::None);
    }
    if command.psdt() != DataPointer::Sgl && !is_fabrics(command) {
        return Err(Status::INVALID_FIELD);
    }
    let data = match (sgl.type_code(), sgl.subtype(), direction) {
        (Descriptor::DATA_BLOCK, Descriptor::OFFSET, TransferDirection::HostToController) => {
            if sgl.address() != 0 {
                return Err(Status::SGL_OFFSET_INVALID);
            }
            if len_bytes != capsule_bytes {
                return Err(Status::DATA_SGL_LENGTH_INVALID);
            }
            DataTransfer::InCapsule(len_bytes)
        }
        (Descriptor::TRANSPORT_DATA_BLOCK, Descriptor::TRANSPORT, direction) => {
            if capsule_bytes != 0 || len_bytes > transfer_bytes_max {
                return Err(Status::DATA_SGL_LENGTH_INVALID);
            }
            if len_bytes & 3 != 0 {
                return Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
            }
            match direction {
                TransferDirection::HostToController => DataTransfer::FromHost(len_bytes),
                TransferDirection::ControllerToHost => DataTransfer::ToHost(len_bytes),
                TransferDirection::None | TransferDirection::Bidirectional => {
                    return Err(Status::INVALID_FIELD);
                }
            }
        }
        _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
    };
    Ok(data)
}
