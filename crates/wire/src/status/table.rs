//! Status code tables.
//!
//! Command specific codes from 80h on belong to an I/O command set; fabrics commands reuse some
//! numbers of the NVM command set with other meanings, and are marked.

use super::Status;

/// Table entry of a status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusEntry {
    /// Status code and type.
    pub status: Status,
    /// Name in the specification.
    pub name: &'static str,
    /// Meaning, in one sentence.
    pub meaning: &'static str,
    /// Section of the specification.
    pub section: &'static str,
    /// Whether it is a status of a fabrics command.
    pub is_fabrics: bool,
}

/// Declares the status codes of each section as constants and as entries of [`TABLE`].
macro_rules! statuses {
    ($(
        $section:literal sct $sct:literal fabrics $fabrics:literal {
            $( $code:literal $constant:ident $name:literal: $meaning:literal; )+
        }
    )+) => {
        impl Status {
            $($(
                #[doc = concat!($name, ": ", $meaning, " (", $section, ")")]
                pub const $constant: Self = Self::new($sct, $code);
            )+)+
        }

        /// All status codes defined by the specifications, by section.
        pub static TABLE: &[StatusEntry] = &[$($(
            StatusEntry {
                status: Status::$constant,
                name: $name,
                meaning: $meaning,
                section: $section,
                is_fabrics: $fabrics,
            },
        )+)+];
    };
}

statuses! {
    "Base 2.1 §4.2.3.1" sct 0 fabrics false {
        0x00 SUCCESS "Successful Completion":
            "The command completed without an error.";
        0x01 INVALID_OPCODE "Invalid Command Opcode":
            "The opcode is not supported.";
        0x02 INVALID_FIELD "Invalid Field in Command":
            "A field holds a value that is reserved or not supported.";
        0x03 COMMAND_ID_CONFLICT "Command ID Conflict":
            "The command identifier is already in use.";
        0x04 DATA_TRANSFER_ERROR "Data Transfer Error":
            "Data or metadata could not be transferred.";
        0x05 ABORTED_POWER_LOSS "Commands Aborted due to Power Loss Notification":
            "Power was about to be lost.";
        0x06 INTERNAL_ERROR "Internal Error":
            "The controller failed; see the log page or a self-test.";
        0x07 ABORT_REQUESTED "Command Abort Requested":
            "An Abort or Cancel command ended it.";
        0x08 ABORTED_SQ_DELETION "Command Aborted due to SQ Deletion":
            "Its submission queue was deleted.";
        0x09 ABORTED_FAILED_FUSED "Command Aborted due to Failed Fused Command":
            "The other half of the fused pair failed.";
        0x0a ABORTED_MISSING_FUSED "Command Aborted due to Missing Fused Command":
            "The other half of the fused pair did not come next.";
        0x0b INVALID_NAMESPACE_OR_FORMAT "Invalid Namespace or Format":
            "The namespace does not exist or its format is not supported.";
        0x0c COMMAND_SEQUENCE_ERROR "Command Sequence Error":
            "The command was out of order in a sequence.";
        0x0d INVALID_SGL_SEGMENT_DESCRIPTOR "Invalid SGL Segment Descriptor":
            "A segment holds a segment descriptor elsewhere than at its end, or a last one is missing.";
        0x0e INVALID_SGL_DESCRIPTOR_COUNT "Invalid Number of SGL Descriptors":
            "A segment is empty, or a descriptor stands where none may.";
        0x0f DATA_SGL_LENGTH_INVALID "Data SGL Length Invalid":
            "The data SGL is too short or too long for the command.";
        0x10 METADATA_SGL_LENGTH_INVALID "Metadata SGL Length Invalid":
            "The metadata SGL is too short or too long for the command.";
        0x11 SGL_DESCRIPTOR_TYPE_INVALID "SGL Descriptor Type Invalid":
            "The type of an SGL descriptor is not supported.";
        0x12 INVALID_USE_OF_CMB "Invalid Use of Controller Memory Buffer":
            "The controller memory buffer cannot be used for this.";
        0x13 PRP_OFFSET_INVALID "PRP Offset Invalid":
            "The offset of a PRP entry is not allowed where it stands.";
        0x14 ATOMIC_WRITE_UNIT_EXCEEDED "Atomic Write Unit Exceeded":
            "The length is above the atomic write unit.";
        0x15 OPERATION_DENIED "Operation Denied":
            "The host lacks the rights for it.";
        0x16 SGL_OFFSET_INVALID "SGL Offset Invalid":
            "The offset of an SGL descriptor is not allowed.";
        0x18 HOST_IDENTIFIER_INCONSISTENT_FORMAT "Host Identifier Inconsistent Format":
            "Controllers of the subsystem use host identifiers of different lengths.";
        0x19 KEEP_ALIVE_TIMER_EXPIRED "Keep Alive Timer Expired":
            "No keep-alive arrived in time.";
        0x1a KEEP_ALIVE_TIMEOUT_INVALID "Keep Alive Timeout Invalid":
            "The keep-alive timeout is not supported.";
        0x1b ABORTED_PREEMPT_AND_ABORT "Command Aborted due to Preempt and Abort":
            "A reservation was preempted with abort.";
        0x1c SANITIZE_FAILED "Sanitize Failed":
            "The last sanitize operation failed and no recovery has succeeded.";
        0x1d SANITIZE_IN_PROGRESS "Sanitize In Progress":
            "A sanitize operation forbids the command.";
        0x1e SGL_DATA_BLOCK_GRANULARITY_INVALID "SGL Data Block Granularity Invalid":
            "An address or a length is not a multiple of a dword.";
        0x1f NOT_SUPPORTED_FOR_QUEUE_IN_CMB "Command Not Supported for Queue in CMB":
            "The queue lies in the controller memory buffer and the command's data does not.";
        0x20 NAMESPACE_WRITE_PROTECTED "Namespace is Write Protected":
            "The namespace may not be written.";
        0x21 COMMAND_INTERRUPTED "Command Interrupted":
            "The controller could not finish it now; try again.";
        0x22 TRANSIENT_TRANSPORT_ERROR "Transient Transport Error":
            "The transport failed for the moment.";
        0x23 PROHIBITED_BY_LOCKDOWN "Command Prohibited by Command and Feature Lockdown":
            "The Lockdown command forbids it.";
        0x24 ADMIN_MEDIA_NOT_READY "Admin Command Media Not Ready":
            "The admin command needs media that are not ready yet.";
        0x25 INVALID_KEY_TAG "Invalid Key Tag":
            "The key tag names no key.";
        0x26 DISPERSED_NAMESPACE_NOT_ENABLED "Host Dispersed Namespace Support Not Enabled":
            "The host has not enabled dispersed namespaces.";
        0x27 HOST_IDENTIFIER_NOT_INITIALIZED "Host Identifier Not Initialized":
            "The command needs a host identifier and there is none.";
        0x28 INCORRECT_KEY "Incorrect Key":
            "The key does not open the media.";
        0x29 FDP_DISABLED "FDP Disabled":
            "Flexible data placement is off in this endurance group.";
        0x2a INVALID_PLACEMENT_HANDLE_LIST "Invalid Placement Handle List":
            "The list of placement handles is not allowed.";
    }
    "NVM 1.1 §3.1.2" sct 0 fabrics false {
        0x80 LBA_OUT_OF_RANGE "LBA Out of Range":
            "The range ends behind the namespace.";
        0x81 CAPACITY_EXCEEDED "Capacity Exceeded":
            "The write would need more than the namespace's capacity.";
        0x82 NAMESPACE_NOT_READY "Namespace Not Ready":
            "The namespace cannot be accessed now.";
        0x83 RESERVATION_CONFLICT "Reservation Conflict":
            "Another host holds a reservation.";
        0x84 FORMAT_IN_PROGRESS "Format In Progress":
            "The namespace is being formatted.";
    }
    "Key Value 1.1 §3.1" sct 0 fabrics false {
        0x85 INVALID_VALUE_SIZE "Invalid Value Size":
            "The value's size is not allowed.";
        0x86 INVALID_KEY_SIZE "Invalid Key Size":
            "The key's size is not allowed.";
        0x87 KEY_DOES_NOT_EXIST "KV Key Does Not Exist":
            "There is no such key.";
        0x88 KV_UNRECOVERED_ERROR "Unrecovered Error":
            "The value could not be read.";
        0x89 KEY_EXISTS "Key Exists":
            "The key exists already.";
    }
    "Base 2.1 §4.2.3.2" sct 1 fabrics false {
        0x00 COMPLETION_QUEUE_INVALID "Completion Queue Invalid":
            "There is no such completion queue.";
        0x01 INVALID_QUEUE_IDENTIFIER "Invalid Queue Identifier":
            "The queue identifier is in use, out of range or unknown.";
        0x02 INVALID_QUEUE_SIZE "Invalid Queue Size":
            "The queue size is zero or above what is supported.";
        0x03 ABORT_COMMAND_LIMIT_EXCEEDED "Abort Command Limit Exceeded":
            "Too many Abort commands are outstanding.";
        0x05 AER_LIMIT_EXCEEDED "Asynchronous Event Request Limit Exceeded":
            "Too many Asynchronous Event Requests are outstanding.";
        0x06 INVALID_FIRMWARE_SLOT "Invalid Firmware Slot":
            "The slot does not exist or is read-only.";
        0x07 INVALID_FIRMWARE_IMAGE "Invalid Firmware Image":
            "The image cannot be used.";
        0x08 INVALID_INTERRUPT_VECTOR "Invalid Interrupt Vector":
            "There is no such interrupt vector.";
        0x09 INVALID_LOG_PAGE "Invalid Log Page":
            "The log page or its parameters are not supported.";
        0x0a INVALID_FORMAT "Invalid Format":
            "The LBA format or its protection is not supported.";
        0x0b FIRMWARE_NEEDS_CONVENTIONAL_RESET "Firmware Activation Requires Conventional Reset":
            "The image is committed and a conventional reset will activate it.";
        0x0c INVALID_QUEUE_DELETION "Invalid Queue Deletion":
            "A completion queue may not go before its submission queues.";
        0x0d FEATURE_NOT_SAVEABLE "Feature Identifier Not Saveable":
            "The feature cannot be saved.";
        0x0e FEATURE_NOT_CHANGEABLE "Feature Not Changeable":
            "The feature cannot be changed.";
        0x0f FEATURE_NOT_NAMESPACE_SPECIFIC "Feature Not Namespace Specific":
            "The feature belongs to the controller and a namespace was given.";
        0x10 FIRMWARE_NEEDS_SUBSYSTEM_RESET "Firmware Activation Requires NVM Subsystem Reset":
            "The image is committed and a subsystem reset will activate it.";
        0x11 FIRMWARE_NEEDS_CONTROLLER_RESET "Firmware Activation Requires Controller Level Reset":
            "The image is committed and a controller level reset will activate it.";
        0x12 FIRMWARE_NEEDS_TOO_LONG "Firmware Activation Requires Maximum Time Violation":
            "Activation now would take longer than MTFA.";
        0x13 FIRMWARE_ACTIVATION_PROHIBITED "Firmware Activation Prohibited":
            "The image may not be activated.";
        0x14 OVERLAPPING_RANGE "Overlapping Range":
            "Ranges of a download or of LBA types overlap.";
        0x15 NAMESPACE_INSUFFICIENT_CAPACITY "Namespace Insufficient Capacity":
            "There is not enough free space for the namespace.";
        0x16 NAMESPACE_IDENTIFIER_UNAVAILABLE "Namespace Identifier Unavailable":
            "There are too many namespaces.";
        0x18 NAMESPACE_ALREADY_ATTACHED "Namespace Already Attached":
            "The controller has the namespace already.";
        0x19 NAMESPACE_IS_PRIVATE "Namespace Is Private":
            "The namespace is private to another controller.";
        0x1a NAMESPACE_NOT_ATTACHED "Namespace Not Attached":
            "The controller does not have the namespace.";
        0x1b THIN_PROVISIONING_NOT_SUPPORTED "Thin Provisioning Not Supported":
            "Capacity must equal size.";
        0x1c CONTROLLER_LIST_INVALID "Controller List Invalid":
            "The controller list is malformed or names a controller that is not there.";
        0x1d SELF_TEST_IN_PROGRESS "Device Self-test In Progress":
            "Another self-test runs.";
        0x1e BOOT_PARTITION_WRITE_PROHIBITED "Boot Partition Write Prohibited":
            "The boot partition is locked.";
        0x1f INVALID_CONTROLLER_IDENTIFIER "Invalid Controller Identifier":
            "There is no such controller.";
        0x20 INVALID_SECONDARY_CONTROLLER_STATE "Invalid Secondary Controller State":
            "The secondary controller's state forbids it.";
        0x21 INVALID_RESOURCE_COUNT "Invalid Number of Controller Resources":
            "That many resources cannot be assigned.";
        0x22 INVALID_RESOURCE_IDENTIFIER "Invalid Resource Identifier":
            "There is no such resource.";
        0x23 SANITIZE_PROHIBITED_BY_PMR "Sanitize Prohibited While Persistent Memory Region is Enabled":
            "The persistent memory region must be disabled first.";
        0x24 ANA_GROUP_IDENTIFIER_INVALID "ANA Group Identifier Invalid":
            "There is no such ANA group.";
        0x25 ANA_ATTACH_FAILED "ANA Attach Failed":
            "The ANA state forbids attaching the namespace.";
        0x26 INSUFFICIENT_CAPACITY "Insufficient Capacity":
            "There is not enough free capacity.";
        0x27 NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED "Namespace Attachment Limit Exceeded":
            "The controller or domain has too many namespaces.";
        0x28 LOCKDOWN_NOT_SUPPORTED "Prohibition of Command Execution Not Supported":
            "The command or feature cannot be locked.";
        0x29 COMMAND_SET_NOT_SUPPORTED "I/O Command Set Not Supported":
            "The I/O command set is not supported.";
        0x2a COMMAND_SET_NOT_ENABLED "I/O Command Set Not Enabled":
            "The I/O command set is not enabled.";
        0x2b COMMAND_SET_COMBINATION_REJECTED "I/O Command Set Combination Rejected":
            "The combination of I/O command sets cannot be enabled.";
        0x2c INVALID_COMMAND_SET "Invalid I/O Command Set":
            "The I/O command set does not fit the command.";
        0x2d IDENTIFIER_UNAVAILABLE "Identifier Unavailable":
            "There is no identifier left.";
        0x2e NAMESPACE_IS_DISPERSED "Namespace Is Dispersed":
            "The command does not act on a dispersed namespace.";
        0x2f INVALID_DISCOVERY_INFORMATION "Invalid Discovery Information":
            "The discovery information is malformed.";
        0x30 ZONING_LOCKED "Zoning Data Structure Locked":
            "The zoning data structure is locked.";
        0x31 ZONING_NOT_FOUND "Zoning Data Structure Not Found":
            "There is no such zoning data structure.";
        0x32 INSUFFICIENT_DISCOVERY_RESOURCES "Insufficient Discovery Resources":
            "The discovery controller has no space for the entry.";
        0x33 REQUESTED_FUNCTION_DISABLED "Requested Function Disabled":
            "The function is switched off.";
        0x34 ZONE_GROUP_ORIGINATOR_INVALID "ZoneGroup Originator Invalid":
            "The zone group belongs to another originator.";
        0x35 INVALID_HOST "Invalid Host":
            "The host is not known.";
        0x36 INVALID_SUBSYSTEM "Invalid NVM Subsystem":
            "The NVM subsystem is not known.";
        0x37 INVALID_CONTROLLER_DATA_QUEUE "Invalid Controller Data Queue":
            "There is no such controller data queue.";
        0x38 NOT_ENOUGH_RESOURCES "Not Enough Resources":
            "Resources have run out.";
        0x39 CONTROLLER_SUSPENDED "Controller Suspended":
            "The controller is suspended.";
        0x3a CONTROLLER_NOT_SUSPENDED "Controller Not Suspended":
            "The controller is not suspended and would have to be.";
        0x3b CONTROLLER_DATA_QUEUE_FULL "Controller Data Queue Full":
            "The controller data queue is full.";
        0x7f STREAM_RESOURCE_ALLOCATION_FAILED "Stream Resource Allocation Failed":
            "The controller cannot open one more stream.";
    }
    "Base 2.3 §4.2.3.2" sct 1 fabrics false {
        0x3f CROSS_CONTROLLER_RESET_IN_PROGRESS "Cross-Controller Reset in Progress":
            "The controller is being reset already.";
        0x40 CROSS_CONTROLLER_RESET_LOG_FULL "Cross-Controller Reset Log Page Full":
            "The log page of such resets is full.";
        0x41 CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED "Cross-Controller Reset Limit Exceeded":
            "Too many such resets are in progress.";
    }
    "NVM 1.1 §3.1.2" sct 1 fabrics false {
        0x80 CONFLICTING_ATTRIBUTES "Conflicting Attributes":
            "Attributes of the command contradict each other.";
        0x81 INVALID_PROTECTION_INFORMATION "Invalid Protection Information":
            "The protection settings do not fit the namespace.";
        0x82 WRITE_TO_READ_ONLY_RANGE "Attempted Write to Read Only Range":
            "The range is read-only.";
        0x83 COMMAND_SIZE_LIMIT_EXCEEDED "Command Size Limit Exceeded":
            "The command is above a size limit of the namespace.";
        0x85 INCOMPATIBLE_NAMESPACE_OR_FORMAT "Incompatible Namespace or Format":
            "Source and destination of a copy do not fit.";
        0x86 FAST_COPY_NOT_POSSIBLE "Fast Copy Not Possible":
            "The copy would not be faster than reading and writing.";
        0x87 OVERLAPPING_IO_RANGE "Overlapping I/O Range":
            "A source range overlaps the destination.";
        0x88 NAMESPACE_NOT_REACHABLE "Namespace Not Reachable":
            "The source namespace cannot be reached.";
        0x89 INSUFFICIENT_RESOURCES "Insufficient Resources":
            "The copy needs resources that are in use.";
    }
    "Base 2.1 §7.1" sct 1 fabrics false {
        0x84 INVALID_COMMAND_ID "Invalid Command ID":
            "The Cancel command's identifier cannot be cancelled.";
    }
    "Zoned 1.2 §3.1" sct 1 fabrics false {
        0xb8 ZONE_BOUNDARY_ERROR "Zoned Boundary Error":
            "The range crosses the boundary of a zone.";
        0xb9 ZONE_IS_FULL "Zone Is Full":
            "The zone is full.";
        0xba ZONE_IS_READ_ONLY "Zone Is Read Only":
            "The zone may not be written.";
        0xbb ZONE_IS_OFFLINE "Zone Is Offline":
            "The zone is offline.";
        0xbc ZONE_INVALID_WRITE "Zone Invalid Write":
            "The write is not at the write pointer.";
        0xbd TOO_MANY_ACTIVE_ZONES "Too Many Active Zones":
            "No further zone can become active.";
        0xbe TOO_MANY_OPEN_ZONES "Too Many Open Zones":
            "No further zone can be opened.";
        0xbf INVALID_ZONE_STATE_TRANSITION "Invalid Zone State Transition":
            "The zone's state does not allow it.";
    }
    "Base 2.1 §6.1" sct 1 fabrics true {
        0x80 CONNECT_INCOMPATIBLE_FORMAT "Incompatible Format":
            "The record format is not supported.";
        0x81 CONNECT_CONTROLLER_BUSY "Controller Busy":
            "The controller is in use by another host, or none is left.";
        0x82 CONNECT_INVALID_PARAMETERS "Connect Invalid Parameters":
            "A parameter of Connect is invalid; the result names it.";
        0x83 CONNECT_RESTART_DISCOVERY "Connect Restart Discovery":
            "The subsystem is not available here; discover again.";
        0x84 CONNECT_INVALID_HOST "Connect Invalid Host":
            "The host may not connect.";
        0x85 INVALID_QUEUE_TYPE "Invalid Queue Type":
            "The command is not for this type of queue.";
        0x90 DISCOVER_RESTART "Discover Restart":
            "The discovery log page changed while it was read.";
        0x91 AUTHENTICATION_REQUIRED "Authentication Required":
            "The queue has not authenticated yet.";
    }
    "NVM 1.1 §3.1.2" sct 2 fabrics false {
        0x80 WRITE_FAULT "Write Fault":
            "The data could not be committed to the medium.";
        0x81 UNRECOVERED_READ_ERROR "Unrecovered Read Error":
            "The data could not be recovered from the medium.";
        0x82 GUARD_CHECK_ERROR "End-to-end Guard Check Error":
            "The guard does not match the data.";
        0x83 APPLICATION_TAG_CHECK_ERROR "End-to-end Application Tag Check Error":
            "The application tag is not the one expected.";
        0x84 REFERENCE_TAG_CHECK_ERROR "End-to-end Reference Tag Check Error":
            "The reference tag is not the one expected.";
        0x85 COMPARE_FAILURE "Compare Failure":
            "The data on the medium differ.";
        0x86 ACCESS_DENIED "Access Denied":
            "The LBA range may not be accessed.";
        0x87 DEALLOCATED_OR_UNWRITTEN "Deallocated or Unwritten Logical Block":
            "The block is deallocated or unwritten, and error recovery requires an error.";
        0x88 STORAGE_TAG_CHECK_ERROR "End-to-end Storage Tag Check Error":
            "The storage tag is not the one expected.";
    }
    "Base 2.1 §4.2.3.4" sct 3 fabrics false {
        0x00 INTERNAL_PATH_ERROR "Internal Path Error":
            "The path failed inside the controller.";
        0x01 ANA_PERSISTENT_LOSS "Asymmetric Access Persistent Loss":
            "The namespace will not come back on this controller.";
        0x02 ANA_INACCESSIBLE "Asymmetric Access Inaccessible":
            "The namespace cannot be reached through this controller.";
        0x03 ANA_TRANSITION "Asymmetric Access Transition":
            "The access state is about to change.";
        0x60 CONTROLLER_PATHING_ERROR "Controller Pathing Error":
            "The controller found the path broken.";
        0x70 HOST_PATHING_ERROR "Host Pathing Error":
            "The host found the path broken.";
        0x71 ABORTED_BY_HOST "Command Aborted By Host":
            "The host gave the command up when the path failed.";
    }
}
