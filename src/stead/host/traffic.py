"""Traffic counters of VMs, read from a namespace's rules without a process: there may be hundreds of VPCs."""

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nftsocket import NFT_MSG_GETSETELEM, NFTSocket, nft_set_elem_list_msg

from stead.addresses import slot_of_data_tap
from stead.errors import HostError
from stead.host.firewall import TABLE, TRAFFIC_SET

_INET = 1


def read_traffic() -> dict[int, int]:
    """IPv4 bytes of each slot in both directions. Call it in a thread of the namespace."""
    wanted = nft_set_elem_list_msg()
    wanted["attrs"] = [("NFTA_SET_ELEM_LIST_TABLE", TABLE), ("NFTA_SET_ELEM_LIST_SET", TRAFFIC_SET)]
    try:
        with NFTSocket(nfgen_family=_INET) as nftables:
            messages = nftables.request_get(wanted, NFT_MSG_GETSETELEM)
    except (NetlinkError, OSError) as error:
        raise HostError(f"cannot read traffic counters: {error}") from error
    counted = {}
    for message in messages:
        for element in message.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS") or ():
            name = element.get_attr("NFTA_SET_ELEM_KEY").get_attr("NFTA_DATA_VALUE").rstrip(b"\0").decode()
            counter = element.get_attr("NFTA_SET_ELEM_EXPR").get_attr("NFTA_EXPR_DATA")
            slot = slot_of_data_tap(name)
            if slot is not None:
                counted[slot] = int(counter.get_attr("NFTA_COUNTER_BYTES"))
    return counted
