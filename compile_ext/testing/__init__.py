"""For the tests of ops that have a contract: ``check_contract`` runs the op and proves the claims.

Not part of ``import compile_ext``; import it where it is used.
"""

from compile_ext.ops.errors import ClaimError
from compile_ext.testing.check_contract import check_contract
from compile_ext.testing.report import Claim, ContractReport

__all__ = ["Claim", "ClaimError", "ContractReport", "check_contract"]
