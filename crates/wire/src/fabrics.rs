//! Fabrics commands (Base 2.1 §6).
//!
//! All share opcode 7Fh and are distinguished by FCTYPE, which occupies the low byte of NSID.

use crate::field_type::{Ascii, code};
use crate::layout::layout;
use crate::opcode::{AdminOpcode, FabricsType};
use crate::status::Status;
use crate::typed::commands;

commands! {
    /// Property Set (Base 2.1 §6.6).
    pub struct PropertySet = AdminOpcode::FabricsCommands, fabrics FabricsType::PropertySet, "Property Set" {
        /// Attributes: how long the property is.
        size @ 10[0..=2]: PropertySize;
        /// Offset of the property.
        ofst @ 11[0..=31]: u32;
        /// Value.
        value @ 12[0..=63]: u64;
    }

    /// Connect; its data is a [`ConnectData`] (Base 2.1 §6.3).
    pub struct Connect = AdminOpcode::FabricsCommands, fabrics FabricsType::Connect, "Connect" {
        /// Record Format: 0.
        recfmt @ 10[0..=15]: u16;
        /// Queue ID: 0 is the admin queue.
        qid @ 10[16..=31]: u16;
        /// Submission Queue Size, 0's based.
        sqsize @ 11[0..=15]: u16;
        /// Connect Attributes: priority class.
        priority @ 11[16..=17]: u8;
        /// Connect Attributes: disable SQ flow control.
        disable_sq_flow_control @ 11[18]: bool;
        /// Connect Attributes: support for deletion of individual I/O queues.
        individual_queue_deletion @ 11[19]: bool;
        /// Keep Alive Timeout, in milliseconds.
        kato @ 12[0..=31]: u32;
    }

    /// Property Get (Base 2.1 §6.5).
    pub struct PropertyGet = AdminOpcode::FabricsCommands, fabrics FabricsType::PropertyGet, "Property Get" {
        /// Attributes: how long the property is.
        size @ 10[0..=2]: PropertySize;
        /// Offset of the property.
        ofst @ 11[0..=31]: u32;
    }

    /// Authentication Send (Base 2.1 §6.2).
    pub struct AuthenticationSend = AdminOpcode::FabricsCommands, fabrics FabricsType::AuthenticationSend, "Authentication Send" {
        /// Security Protocol Specific field, low half.
        spsp0 @ 10[8..=15]: u8;
        /// Security Protocol Specific field, high half.
        spsp1 @ 10[16..=23]: u8;
        /// Security Protocol.
        secp @ 10[24..=31]: u8;
        /// Transfer Length, in bytes.
        tl @ 11[0..=31]: u32;
    }

    /// Authentication Receive (Base 2.1 §6.1).
    pub struct AuthenticationReceive = AdminOpcode::FabricsCommands, fabrics FabricsType::AuthenticationReceive, "Authentication Receive" {
        /// Security Protocol Specific field, low half.
        spsp0 @ 10[8..=15]: u8;
        /// Security Protocol Specific field, high half.
        spsp1 @ 10[16..=23]: u8;
        /// Security Protocol.
        secp @ 10[24..=31]: u8;
        /// Allocation Length, in bytes.
        al @ 11[0..=31]: u32;
    }

    /// Disconnect (Base 2.1 §6.4).
    pub struct Disconnect = AdminOpcode::FabricsCommands, fabrics FabricsType::Disconnect, "Disconnect" {
        /// Record Format: 0.
        recfmt @ 10[0..=15]: u16;
    }
}

layout! {
    /// The data of Connect (Base 2.1 §6.3).
    pub struct ConnectData[1024] {
        /// Host Identifier.
        hostid @ 0: [u8; 16];
        /// Controller ID: FFFFh for any, FFFEh for any of a static subsystem.
        cntlid @ 16: u16;
        /// Subsystem NVMe Qualified Name.
        subnqn @ 256: Ascii<256>;
        /// Host NVMe Qualified Name.
        hostnqn @ 512: Ascii<256>;
    }

    /// DW0 of a Connect that succeeded (Base 2.1 §6.3).
    pub struct Connected(u32) {
        /// Controller ID.
        cntlid @ 0..=15: u16;
        /// Authentication and Security Requirements: in-band authentication is required.
        authentication_required @ 17: bool;
        /// Authentication and Security Requirements: a secure channel is to be made with it.
        secure_channel_required @ 18: bool;
    }

    /// DW0 of a Connect that failed with Connect Invalid Parameters (Base 2.1 §6.3).
    pub struct InvalidParameter(u32) {
        /// Invalid Parameter Offset, in bytes.
        ipo @ 0..=15: u16;
        /// Invalid Attributes: the offset is one into the data and not into the command.
        in_data @ 16: bool;
    }
}

code! {
    /// ATTRIB of Property Get and Set (Base 2.1 §6.5).
    pub enum PropertySize {
        /// Four bytes.
        Four = 0,
        /// Eight bytes.
        Eight = 1,
    }
}

/// Controller ID that requests any controller (Base 2.1 §6.3).
pub const CNTLID_DYNAMIC: u16 = 0xffff;

/// Controller ID that requests any controller of a static subsystem (Base 2.1 §6.3).
pub const CNTLID_STATIC: u16 = 0xfffe;

/// The highest identifier a controller may have (Base 2.1 §3.1.3).
pub const CNTLID_MAX: u16 = 0xffef;

/// SQHD in the response to Connect if the controller agrees to disable SQ flow control (Base 2.1
/// §6.3).
pub const SQHD_WITHOUT_FLOW_CONTROL: u16 = 0xffff;

impl InvalidParameter {
    /// Status of a failed Connect with this in DW0.
    pub const STATUS: Status = Status::CONNECT_INVALID_PARAMETERS;
}

#[cfg(test)]
mod tests {
    use super::{Connect, ConnectData, Disconnect, PropertyGet, PropertySet, PropertySize};
    use crate::command::Command;
    use crate::field_type::Ascii;
    use crate::nqn;
    use crate::status::Status;
    use crate::typed::TypedCommand;

    #[test]
    fn connect_command_has_the_layout_of_section_6_3() {
        let connect = Connect {
            qid: 0x0203,
            sqsize: 0x007f,
            disable_sq_flow_control: true,
            kato: 0x0001_0203,
            ..Connect::default()
        };
        let bytes = connect.to_command().with_cid(0x0708).to_bytes();
        assert_eq!(bytes[..5], [0x7f, 0, 0x08, 0x07, 0x01]);
        assert_eq!(bytes[40..52], [0, 0, 3, 2, 0x7f, 0, 4, 0, 3, 2, 1, 0]);
        assert_eq!(Connect::parse(&Command::from_bytes(&bytes)), Ok(connect));
    }

    #[test]
    fn property_commands_have_the_layout_of_their_section() {
        let size = PropertySize::Eight;
        let set = PropertySet { size, ofst: 0x1c, value: 0x0102_0304_0506_0708 };
        let bytes = set.to_command().to_bytes();
        assert_eq!(bytes[..5], [0x7f, 0, 0, 0, 0x00]);
        assert_eq!(bytes[40..48], [1, 0, 0, 0, 0x1c, 0, 0, 0]);
        assert_eq!(bytes[48..56], [8, 7, 6, 5, 4, 3, 2, 1]);
    }

    #[test]
    fn a_fabrics_command_of_another_type_is_refused() {
        let get = PropertyGet::default().to_command();
        assert_eq!(PropertySet::parse(&get), Err(Status::INVALID_OPCODE));
        assert_eq!(Disconnect::parse(&get), Err(Status::INVALID_OPCODE));
        assert!(PropertyGet::parse(&get).is_ok());
    }

    #[test]
    fn nqns_in_connect_data_are_zero_padded() {
        let data = ConnectData::zeroed().with(|data| {
            data.cntlid(super::CNTLID_DYNAMIC).subnqn(Ascii::nul_padded(nqn::DISCOVERY))
        });
        assert_eq!(data.as_bytes()[16..18], [0xff, 0xff]);
        assert_eq!(nqn::parse_nqn_field(&data.subnqn().0), Ok(nqn::DISCOVERY));
        assert_eq!(data.as_bytes()[256..260], *b"nqn.");
    }
}
